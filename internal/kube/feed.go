package kube

import (
	"sync"
	"time"
)

// A selector says which objects a feed is about. What is empty does not matter.
type selector struct {
	namespace string
	name      string // metadata.name
	service   string // the label kubernetes.io/service-name
	node      string // spec.nodeName
}

// feed is the objects of one selector, as the source last told them. The lock
// of the feeds guards it.
type feed[T any] struct {
	selector selector
	watch    *watchState
	objects  map[Name]T
}

// watchState is how a source's watch is faring, over one feed or several.
type watchState struct {
	name   string
	synced bool      // has been read once
	heard  time.Time // from the source, last; or the beginning
	err    error     // why it does not get on at present
}

// feeds are everything that is watched.
type feeds struct {
	services   map[Name]*feed[service] // each of one object
	slices     map[Name]*feed[slice]   // by Service
	pods       *feed[pod]              // nil: not wanted
	namespaces *feed[namespace]        // nil: not wanted

	// changed has capacity 1: something differs from when it was last read.
	changed chan struct{}

	mu      sync.Mutex // guards the feeds' contents and what follows
	watches []*watchState
}

func newFeeds(c Config) *feeds {
	f := &feeds{
		services: map[Name]*feed[service]{},
		slices:   map[Name]*feed[slice]{},
		changed:  make(chan struct{}, 1),
	}
	for _, n := range c.Services {
		f.services[n] = &feed[service]{selector: selector{namespace: n.Namespace, name: n.Name}}
		f.slices[n] = &feed[slice]{selector: selector{namespace: n.Namespace, service: n.Name}}
	}
	if n := c.DNSService; n != (Name{}) && f.services[n] == nil {
		f.services[n] = &feed[service]{selector: selector{namespace: n.Namespace, name: n.Name}}
	}
	if c.Pods {
		f.pods = &feed[pod]{selector: selector{node: c.NodeName}}
	}
	if c.Namespaces {
		f.namespaces = &feed[namespace]{}
	}
	return f
}

// newWatch adds a watch. Before anything runs.
func (f *feeds) newWatch(name string) *watchState {
	w := &watchState{name: name, heard: time.Now()}
	f.watches = append(f.watches, w)
	return w
}

// update changes, under the lock, what has been heard on a watch, and tells
// that there is something new.
func (f *feeds) update(change func()) {
	f.mu.Lock()
	change()
	f.mu.Unlock()
	f.kick()
}

func (f *feeds) kick() {
	select {
	case f.changed <- struct{}{}:
	default:
	}
}

// arrived notes, with the lock held, that all is well with a watch that has
// brought something.
func (w *watchState) arrived() {
	w.synced, w.heard, w.err = true, time.Now(), nil
}

// unreadable tells, with the lock held, that a watch has brought nothing yet, and
// does not get on.
func (w *watchState) unreadable() bool { return !w.synced && w.err != nil }

// contact notes that the source has been heard.
func (f *feeds) contact(w *watchState) {
	f.mu.Lock()
	defer f.mu.Unlock()
	w.heard = time.Now()
}

// fail notes what keeps a watch from getting on; nil: nothing does any more.
func (f *feeds) fail(w *watchState, err error) {
	f.update(func() { w.err = err })
}
