package kube

import (
	"context"
	"errors"
	"fmt"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
)

// How long the API server may take: to answer, of which it allows itself 60 s
// for a list (--request-timeout), and the header of a watch comes with a
// bookmark at the latest; and for a watch, of which the reflector asks for 5 to
// 10 minutes. A server or proxy that takes longer has forgotten about us, and
// the pings of HTTP/2 (30 s, then 15 s; client-go's defaults) find only
// connections that are dead altogether.
const (
	answerTimeout = 70 * time.Second
	watchTimeout  = 11 * time.Minute
)

// newPauses returns the pauses between attempts at a server that does not
// answer, the reflector's own: 0.8 to 1.6 s at first, 30 to 60 s in the end, and
// anew every pausesReset; on average 18 s.
func newPauses() wait.Backoff {
	return wait.Backoff{Duration: 800 * time.Millisecond, Factor: 2, Jitter: 1, Steps: 10, Cap: 30 * time.Second}
}

const pausesReset = 2 * time.Minute

// kind is how objects are read: as O from the API, to be kept as T.
type kind[O, T any] struct {
	client   *rest.RESTClient
	resource string
	newList  func() runtime.Object
	convert  func(*O) T
}

// follow adds the watch that a feed needs, and returns what keeps it up to date:
// a reflector, which streams the list where the server can, lists from the
// server's cache where it cannot, and watches on from the version it has.
func follow[O, T any](f *feeds, to *feed[T], k kind[O, T]) func(context.Context) {
	pauses := newPauses()
	to.watch = f.newWatch(to.selector.describe(k.resource))
	p := &puller[O, T]{kind: k, ear: &ear{feeds: f, watch: to.watch}, selector: to.selector}
	return func(ctx context.Context) {
		c := stoppableClock{ctx: ctx}
		r := cache.NewReflectorWithOptions(
			&cache.ListWatch{ListWithContextFunc: p.list, WatchFuncWithContext: p.watch},
			new(O),
			&store[O, T]{feeds: f, feed: to, convert: k.convert},
			cache.ReflectorOptions{Name: to.watch.name, Clock: c, Backoff: &pauses},
		)
		// As the reflector's own Run, which would log each failure besides:
		// they are ours to tell, and have been told.
		_ = pauses.DelayWithReset(c, pausesReset).Until(ctx, true, true, func(ctx context.Context) (bool, error) {
			_ = r.ListAndWatchWithContext(ctx)
			return false, nil
		})
	}
}

func (s selector) describe(resource string) string {
	switch {
	case s.name != "":
		return resource + " " + Name{s.namespace, s.name}.String()
	case s.service != "":
		return resource + " of " + Name{s.namespace, s.service}.String()
	case s.node != "":
		return resource + " of node " + s.node
	}
	return resource
}

func (s selector) restrict(o *metav1.ListOptions) {
	switch {
	case s.name != "":
		o.FieldSelector = fields.OneTermEqualSelector("metadata.name", s.name).String()
	case s.service != "":
		o.LabelSelector = labels.Set{discoveryv1.LabelServiceName: s.service}.String()
	case s.node != "":
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", s.node).String()
	}
}

// puller makes a reflector's requests.
type puller[O, T any] struct {
	kind[O, T]
	ear      *ear
	selector selector
}

func (p *puller[O, T]) request(o metav1.ListOptions) *rest.Request {
	p.selector.restrict(&o)
	return p.client.Get().Namespace(p.selector.namespace).Resource(p.resource).VersionedParams(&o, metav1.ParameterCodec)
}

func (p *puller[O, T]) list(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	ctx, cancel := context.WithTimeoutCause(p.ear.with(ctx), answerTimeout, noAnswer())
	defer cancel()
	list := p.newList()
	if err := p.request(o).Do(ctx).Into(list); err != nil {
		p.refused(ctx, o, err)
		return nil, err
	}
	return list, nil
}

func (p *puller[O, T]) watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.Watch = true
	ctx, cancel := context.WithTimeout(p.ear.with(ctx), watchTimeout)
	ctx, giveUp := context.WithCancelCause(ctx)
	answer := time.AfterFunc(answerTimeout, func() { giveUp(noAnswer()) })
	w, err := p.request(o).Watch(ctx)
	answer.Stop()
	if err != nil {
		p.refused(ctx, o, err)
		cancel()
		return nil, err
	}
	return &boundedWatch{w, cancel}, nil
}

func noAnswer() error { return fmt.Errorf("no answer within %v", answerTimeout) }

// refused notes a failure that the connection did not have: an answer.
func (p *puller[O, T]) refused(ctx context.Context, o metav1.ListOptions, err error) {
	switch {
	case ctx.Err() != nil: // we are leaving, or were not answered at all
	case apierrors.IsResourceExpired(err), apierrors.IsGone(err): // the reflector begins anew
	case o.SendInitialEvents != nil && apierrors.IsInvalid(err): // it lists instead
	case isTransport(err): // noted already
	default:
		p.ear.feeds.fail(p.ear.watch, err)
	}
}

// boundedWatch is a watch with a time limit.
type boundedWatch struct {
	watch.Interface
	cancel context.CancelFunc
}

// Stop ends the watch.
func (w *boundedWatch) Stop() {
	w.Interface.Stop()
	w.cancel()
}

// store is a feed as a reflector fills it.
type store[O, T any] struct {
	feeds   *feeds
	feed    *feed[T]
	convert func(*O) T
}

// item is an object that has been converted before it reached the feed, with
// the metadata that a reflector needs.
type item[T any] struct {
	metav1.ObjectMeta
	value T
}

// Transformer has the reflector convert objects while it reads a streamed list,
// instead of collecting them whole first. It implements
// [cache.TransformingStore].
func (s *store[O, T]) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) {
		i, err := s.item(obj)
		return i, err
	}
}

func (s *store[O, T]) item(obj any) (*item[T], error) {
	switch o := obj.(type) {
	case *item[T]:
		return o, nil
	case *O:
		m := any(o).(metav1.Object)
		return &item[T]{metav1.ObjectMeta{Namespace: m.GetNamespace(), Name: m.GetName()}, s.convert(o)}, nil
	}
	return nil, fmt.Errorf("unexpected %T", obj)
}

func (i *item[T]) name() Name { return Name{i.Namespace, i.Name} }

// Add implements [cache.ReflectorStore].
func (s *store[O, T]) Add(obj any) error {
	i, err := s.item(obj)
	if err != nil {
		return err
	}
	s.feeds.update(func() {
		s.feed.objects[i.name()] = i.value
		s.feed.watch.arrived()
	})
	return nil
}

// Update implements [cache.ReflectorStore].
func (s *store[O, T]) Update(obj any) error { return s.Add(obj) }

// Delete implements [cache.ReflectorStore].
func (s *store[O, T]) Delete(obj any) error {
	i, err := s.item(obj)
	if err != nil {
		return err
	}
	s.feeds.update(func() {
		delete(s.feed.objects, i.name())
		s.feed.watch.arrived()
	})
	return nil
}

// Replace implements [cache.ReflectorStore].
func (s *store[O, T]) Replace(objs []any, _ string) error {
	objects := make(map[Name]T, len(objs))
	for _, obj := range objs {
		i, err := s.item(obj)
		if err != nil {
			return err
		}
		objects[i.name()] = i.value
	}
	s.feeds.update(func() {
		s.feed.objects = objects
		s.feed.watch.arrived()
	})
	return nil
}

// Resync implements [cache.ReflectorStore]. It is never asked for.
func (s *store[O, T]) Resync() error { return errors.ErrUnsupported }

// stoppableClock is the real clock, except that whoever waits with After waits
// no longer than the context: the reflector's pause before it asks a server
// again that refused the connection takes up to a minute.
type stoppableClock struct {
	clock.RealClock
	ctx context.Context
}

// After is like [time.After].
func (c stoppableClock) After(d time.Duration) <-chan time.Time {
	over := make(chan time.Time)
	ctx, cancel := context.WithTimeout(c.ctx, d)
	context.AfterFunc(ctx, func() {
		close(over)
		cancel()
	})
	return over
}
