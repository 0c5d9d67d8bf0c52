package kube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
)

// apiServer speaks as much of the API as a reflector hears: lists, streamed
// lists and watches, with selectors, resource versions, bookmarks and 410. It
// is reached through pipes in memory, so that time can be virtual.
type apiServer struct {
	t      *testing.T
	codecs serializer.CodecFactory
	server *http.Server
	conns  chan net.Conn

	// How it behaves; nil or false: well. Change under lock.
	mu          sync.Mutex
	down        bool                                // refuses connections
	refuse      func(*http.Request) *metav1.Status  // answers with an error
	hang        func(*http.Request) <-chan struct{} // does not answer before
	noWatchList bool                                // as older ones do
	noBookmarks bool

	version  int64
	oldest   int64 // watches from before are gone
	objects  map[key]runtime.Object
	history  []change
	changed  chan struct{} // closed at each change
	open     map[net.Conn]bool
	requests []request
	dials    []time.Time
}

type key struct {
	resource string
	name     Name
}

type change struct {
	version int64
	what    watch.EventType
	key     key
	object  runtime.Object
}

type request struct {
	at     time.Time
	path   string
	query  url.Values
	header http.Header
	proto  string
}

func (r request) isWatch() bool { return r.query.Get("watch") != "" }

// startAPI starts a server that ends with the test.
func startAPI(t *testing.T) *apiServer {
	a := &apiServer{
		t: t, codecs: serializer.NewCodecFactory(newScheme()),
		conns: make(chan net.Conn), changed: make(chan struct{}),
		version: 100, objects: map[key]runtime.Object{}, open: map[net.Conn]bool{},
	}
	a.server = &http.Server{Handler: a}
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := a.server.Serve(a); !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("serve: %v", err)
		}
	})
	t.Cleanup(func() {
		a.cut()
		a.server.Close()
		serving.Wait()
	})
	return a
}

// config returns what reaches the server.
func (a *apiServer) config() *rest.Config {
	return &rest.Config{Host: "http://api.test", Dial: a.dial, UserAgent: "dnsguard/test"}
}

func (a *apiServer) dial(ctx context.Context, network, _ string) (net.Conn, error) {
	a.mu.Lock()
	down := a.down
	a.dials = append(a.dials, time.Now())
	a.mu.Unlock()
	if down {
		return nil, &net.OpError{
			Op: "dial", Net: network, Addr: &net.TCPAddr{IP: net.IPv4(10, 96, 0, 1), Port: 443},
			Err: os.NewSyscallError("connect", syscall.ECONNREFUSED),
		}
	}
	client, server := net.Pipe()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case a.conns <- server:
	}
	return client, nil
}

// Accept implements [net.Listener].
func (a *apiServer) Accept() (net.Conn, error) {
	c, ok := <-a.conns
	if !ok {
		return nil, net.ErrClosed
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.open[c] = true
	return c, nil
}

// Close implements [net.Listener].
func (a *apiServer) Close() error {
	close(a.conns)
	return nil
}

// Addr implements [net.Listener].
func (a *apiServer) Addr() net.Addr { return &net.TCPAddr{} }

// behave changes how the server behaves.
func (a *apiServer) behave(change func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change()
}

// cut ends all connections.
func (a *apiServer) cut() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for c := range a.open {
		c.Close()
	}
	clear(a.open)
}

// take returns the requests since it was last called.
func (a *apiServer) take() []request {
	a.mu.Lock()
	defer a.mu.Unlock()
	rs := a.requests
	a.requests = nil
	return rs
}

func keyOf(o runtime.Object) key {
	m := o.(metav1.Object)
	k := key{name: Name{m.GetNamespace(), m.GetName()}}
	switch o.(type) {
	case *corev1.Service:
		k.resource = "services"
	case *corev1.Pod:
		k.resource = "pods"
	case *corev1.Namespace:
		k.resource = "namespaces"
	case *discoveryv1.EndpointSlice:
		k.resource = "endpointslices"
	}
	return k
}

// put creates or changes objects.
func (a *apiServer) put(objects ...runtime.Object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, o := range objects {
		o = o.DeepCopyObject()
		k := keyOf(o)
		what := watch.Modified
		if _, there := a.objects[k]; !there {
			what = watch.Added
		}
		a.objects[k] = o
		a.change(what, k, o)
	}
}

// remove deletes objects.
func (a *apiServer) remove(objects ...runtime.Object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, o := range objects {
		k := keyOf(o)
		last := a.objects[k].DeepCopyObject()
		delete(a.objects, k)
		a.change(watch.Deleted, k, last)
	}
}

func (a *apiServer) change(what watch.EventType, k key, o runtime.Object) {
	a.version++
	o.(metav1.Object).SetResourceVersion(strconv.FormatInt(a.version, 10))
	a.history = append(a.history, change{a.version, what, k, o})
	close(a.changed)
	a.changed = make(chan struct{})
}

// forget makes all watches from before now impossible.
func (a *apiServer) forget() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	a.oldest = a.version
	a.history = nil
}

// ServeHTTP implements [http.Handler].
func (a *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	a.mu.Lock()
	a.requests = append(a.requests, request{time.Now(), r.URL.Path, q, r.Header.Clone(), r.Proto})
	refuse, hang, noWatchList := a.refuse, a.hang, a.noWatchList
	a.mu.Unlock()

	gv := corev1.SchemeGroupVersion
	path := strings.TrimPrefix(r.URL.Path, "/api/v1/")
	if rest, ok := strings.CutPrefix(r.URL.Path, "/apis/discovery.k8s.io/v1/"); ok {
		gv, path = discoveryv1.SchemeGroupVersion, rest
	}
	namespace := ""
	if rest, ok := strings.CutPrefix(path, "namespaces/"); ok {
		namespace, path, _ = strings.Cut(rest, "/")
	}
	out := a.output(w, r, gv)
	if hang != nil {
		if until := hang(r); until != nil {
			select {
			case <-until:
			case <-r.Context().Done():
				return
			}
		}
	}
	if refuse != nil {
		if status := refuse(r); status != nil {
			out.fail(status)
			return
		}
	}
	if noWatchList && q.Get("sendInitialEvents") != "" {
		out.fail(&apierrors.NewInvalid(schema.GroupKind{Group: "meta.k8s.io", Kind: "ListOptions"}, "", nil).ErrStatus)
		return
	}
	wanted, err := selected(path, namespace, q)
	if err != nil {
		out.fail(&apierrors.NewBadRequest(err.Error()).ErrStatus)
		return
	}
	if q.Get("watch") != "" {
		a.watch(r.Context(), out, q, path, wanted)
		return
	}
	a.list(out, path, wanted)
}

// selected returns whether a request is about an object.
func selected(resource, namespace string, q url.Values) (func(runtime.Object) bool, error) {
	byField, err := fields.ParseSelector(q.Get("fieldSelector"))
	if err != nil {
		return nil, err
	}
	byLabel, err := labels.Parse(q.Get("labelSelector"))
	if err != nil {
		return nil, err
	}
	return func(o runtime.Object) bool {
		m, k := o.(metav1.Object), keyOf(o)
		f := fields.Set{"metadata.name": m.GetName()}
		if p, ok := o.(*corev1.Pod); ok {
			f["spec.nodeName"] = p.Spec.NodeName
		}
		return k.resource == resource && (namespace == "" || namespace == k.name.Namespace) &&
			byField.Matches(f) && byLabel.Matches(labels.Set(m.GetLabels()))
	}, nil
}

func (a *apiServer) list(out *output, resource string, wanted func(runtime.Object) bool) {
	list := map[string]runtime.Object{
		"services": &corev1.ServiceList{}, "pods": &corev1.PodList{}, "namespaces": &corev1.NamespaceList{},
		"endpointslices": &discoveryv1.EndpointSliceList{},
	}[resource]
	a.mu.Lock()
	items := a.current(wanted)
	version := a.version
	a.mu.Unlock()
	if err := meta.SetList(list, items); err != nil {
		a.t.Errorf("list: %v", err)
	}
	list.(metav1.ListInterface).SetResourceVersion(strconv.FormatInt(version, 10))
	out.object(http.StatusOK, list)
}

// current returns the objects there are, with the lock held.
func (a *apiServer) current(wanted func(runtime.Object) bool) []runtime.Object {
	var items []runtime.Object
	for _, o := range slices.SortedFunc(maps.Values(a.objects), func(x, y runtime.Object) int {
		return keyOf(x).name.compare(keyOf(y).name)
	}) {
		if wanted(o) {
			items = append(items, o)
		}
	}
	return items
}

// bookmarkInterval is the API server's.
const bookmarkInterval = time.Minute

func (a *apiServer) watch(ctx context.Context, out *output, q url.Values, resource string, wanted func(runtime.Object) bool) {
	version, _ := strconv.ParseInt(q.Get("resourceVersion"), 10, 64)
	seconds, err := strconv.Atoi(q.Get("timeoutSeconds"))
	if err != nil {
		a.t.Errorf("watch without a timeout: %v", q)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(seconds)*time.Second)
	defer cancel()
	a.mu.Lock()
	tooOld := version != 0 && version < a.oldest
	a.mu.Unlock()
	if tooOld {
		out.event(watch.Error, &apierrors.NewResourceExpired("too old resource version").ErrStatus)
		return
	}
	if q.Get("sendInitialEvents") == "true" {
		a.mu.Lock()
		items := a.current(wanted)
		version = a.version
		a.mu.Unlock()
		for _, o := range items {
			out.event(watch.Added, o)
		}
		out.event(watch.Bookmark, bookmark(resource, version, true))
	} else {
		out.flush()
	}
	ticker := time.NewTicker(bookmarkInterval)
	defer ticker.Stop()
	for {
		a.mu.Lock()
		news, changed, noBookmarks := slices.Clone(a.history), a.changed, a.noBookmarks
		a.mu.Unlock()
		for _, c := range news {
			if c.version > version {
				version = c.version
				if wanted(c.object) {
					out.event(c.what, c.object)
				}
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-ticker.C:
			if !noBookmarks {
				out.event(watch.Bookmark, bookmark(resource, version, false))
			}
		}
	}
}

func bookmark(resource string, version int64, initial bool) runtime.Object {
	var o runtime.Object
	switch resource {
	case "services":
		o = &corev1.Service{}
	case "pods":
		o = &corev1.Pod{}
	case "namespaces":
		o = &corev1.Namespace{}
	default:
		o = &discoveryv1.EndpointSlice{}
	}
	m := o.(metav1.Object)
	m.SetResourceVersion(strconv.FormatInt(version, 10))
	if initial {
		m.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	}
	return o
}

// output writes objects in the encoding that was asked for.
type output struct {
	t      *testing.T
	w      http.ResponseWriter
	codecs serializer.CodecFactory
	gv     schema.GroupVersion
	info   runtime.SerializerInfo
	stream streaming.Encoder // nil before the first event
}

func (a *apiServer) output(w http.ResponseWriter, r *http.Request, gv schema.GroupVersion) *output {
	first, _, _ := strings.Cut(r.Header.Get("Accept"), ",")
	info, ok := runtime.SerializerInfoForMediaType(a.codecs.SupportedMediaTypes(), first)
	if !ok {
		a.t.Errorf("Accept %q", r.Header.Get("Accept"))
	}
	return &output{t: a.t, w: w, codecs: a.codecs, gv: gv, info: info}
}

func (o *output) encode(obj runtime.Object, with runtime.Serializer) []byte {
	// An encoder writes the kind into the object; others may be at it, too.
	b, err := runtime.Encode(o.codecs.EncoderForVersion(with, o.gv), obj.DeepCopyObject())
	if err != nil {
		o.t.Errorf("encode %T: %v", obj, err)
	}
	return b
}

func (o *output) object(code int, obj runtime.Object) {
	o.w.Header().Set("Content-Type", o.info.MediaType)
	o.w.WriteHeader(code)
	o.w.Write(o.encode(obj, o.info.Serializer))
}

func (o *output) fail(s *metav1.Status) { o.object(int(s.Code), s) }

// flush sends the header of a stream.
func (o *output) flush() {
	if o.stream == nil {
		o.w.Header().Set("Content-Type", o.info.MediaType+";stream=watch")
		frames := o.info.StreamSerializer.NewFrameWriter(o.w)
		o.stream = streaming.NewEncoder(frames, o.codecs.EncoderForVersion(o.info.StreamSerializer.Serializer, o.gv))
	}
	o.w.(http.Flusher).Flush()
}

func (o *output) event(what watch.EventType, obj runtime.Object) {
	o.flush()
	raw := o.encode(obj, o.info.Serializer)
	_ = o.stream.Encode(&metav1.WatchEvent{Type: string(what), Object: runtime.RawExtension{Raw: raw}}) // the client may have left
	o.w.(http.Flusher).Flush()
}

// forbidden refuses requests for a resource as RBAC does.
func forbidden(resource string) func(*http.Request) *metav1.Status {
	return func(r *http.Request) *metav1.Status {
		if !strings.HasSuffix(r.URL.Path, "/"+resource) {
			return nil
		}
		return &apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", fmt.Errorf("not allowed")).ErrStatus
	}
}
