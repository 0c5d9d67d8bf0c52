package kube

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
)

const (
	// fileInterval is the time between two looks at the file. A change is
	// taken at the second look that finds it: after one to two intervals.
	fileInterval = 250 * time.Millisecond

	// maxFile bounds the file: a thousand Pods as kubectl prints them.
	maxFile = 16 << 20
)

// File is a file of Service, EndpointSlice, Pod and Namespace objects, as YAML
// documents, as a [Source].
//
// Its content is polled, since a mounted file can change without any event in
// this mount namespace. It counts when two looks in a row agree on it: half of
// a file that is being written in place can be a whole file with endpoints
// missing, whose flows would be condemned. A content with anything wrong in it
// is refused as a whole, and the one before stays in force.
type File struct{ path string }

// NewFile returns the file at path, which need not exist yet.
func NewFile(path string) *File { return &File{path} }

// attach implements [Source]. The whole file is one watch.
func (s *File) attach(f *feeds) func(context.Context) {
	w := f.newWatch("file " + s.path)
	for _, feed := range f.services {
		feed.watch = w
	}
	for _, feed := range f.slices {
		feed.watch = w
	}
	if f.pods != nil {
		f.pods.watch = w
	}
	if f.namespaces != nil {
		f.namespaces.watch = w
	}
	return func(ctx context.Context) { s.follow(ctx, f, w) }
}

// follow looks at the file until ctx ends.
func (s *File) follow(ctx context.Context, f *feeds, w *watchState) {
	ticker := time.NewTicker(fileInterval)
	defer ticker.Stop()
	var seen, judged look
	good := false // the content judged last is in force
	for first := true; ctx.Err() == nil; first = false {
		data, now := s.look()
		settled := now == seen || first
		seen = now
		switch {
		case !settled:
		case now == judged && good:
			f.contact(w)
		case now == judged:
		default:
			judged = now
			good = s.take(f, w, data, now)
		}
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
}

// take puts a content in force, if it is right.
func (s *File) take(f *feeds, w *watchState, data []byte, l look) bool {
	if l.err != "" {
		f.fail(w, fmt.Errorf("%s", l.err))
		return false
	}
	m, err := parseManifest(data)
	if err != nil {
		f.fail(w, fmt.Errorf("%s is refused, what it said before stays in force: %w", s.path, err))
		return false
	}
	f.update(func() {
		m.fill(f)
		w.arrived()
	})
	return true
}

// look is what was seen of the file: equal looks saw the same.
type look struct {
	err string
	sum [sha256.Size]byte
}

func (s *File) look() ([]byte, look) {
	data, err := s.read()
	if err != nil {
		return nil, look{err: err.Error()}
	}
	return data, look{sum: sha256.Sum256(data)}
}

func (s *File) read() ([]byte, error) {
	file, err := os.Open(s.path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // nothing was written
	data, err := io.ReadAll(io.LimitReader(file, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = fmt.Errorf("%s: larger than %d MiB", s.path, maxFile>>20)
	}
	return data, err
}

// fill gives each feed what it is about, with the feeds' lock held.
func (m *manifest) fill(f *feeds) {
	for _, feed := range f.services {
		feed.objects = map[Name]service{}
		for _, o := range m.services {
			if o.Namespace == feed.selector.namespace && o.Name == feed.selector.name {
				feed.objects[Name{o.Namespace, o.Name}] = newService(o)
			}
		}
	}
	for _, feed := range f.slices {
		feed.objects = map[Name]slice{}
		for _, o := range m.slices {
			if o.Namespace == feed.selector.namespace && o.Labels[discoveryv1.LabelServiceName] == feed.selector.service {
				feed.objects[Name{o.Namespace, o.Name}] = newSlice(o)
			}
		}
	}
	if f.pods != nil {
		f.pods.objects = map[Name]pod{}
		for _, o := range m.pods {
			if o.Spec.NodeName == f.pods.selector.node {
				f.pods.objects[Name{o.Namespace, o.Name}] = newPod(o)
			}
		}
	}
	if f.namespaces != nil {
		f.namespaces.objects = map[Name]namespace{}
		for _, o := range m.namespaces {
			f.namespaces.objects[Name{Name: o.Name}] = newNamespace(o)
		}
	}
}
