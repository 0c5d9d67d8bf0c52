package kube

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// APIConfig says how the API server is reached.
type APIConfig struct {
	// Kubeconfig is a file's path. Empty: with the pod's service account.
	Kubeconfig string

	// Version is dnsguard's own, for the User-Agent header: the API server's
	// audit log and metrics tell releases apart by it.
	Version string
}

// API is the API server as a [Source].
type API struct {
	http            *http.Client
	core, discovery *rest.RESTClient
}

// NewAPI reads what is needed to reach the API server. It does not try to: that
// the server is out of reach, now or later, is no error.
func NewAPI(c APIConfig) (*API, error) {
	cfg, err := restConfig(c.Kubeconfig)
	if err != nil {
		return nil, err
	}
	cfg.UserAgent = "dnsguard/" + c.Version
	return newAPI(cfg)
}

func restConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig != "" {
		cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("read kubeconfig %s: %w", kubeconfig, err)
		}
		return cfg, nil
	}
	cfg, err := rest.InClusterConfig()
	if err != nil {
		return nil, fmt.Errorf("reach the API server with the pod's service account: %w", err)
	}
	if cfg.CAFile == "" { // the reason was logged
		return nil, errors.New("reach the API server with the pod's service account: its ca.crt cannot be read")
	}
	return cfg, nil
}

func newAPI(cfg *rest.Config) (*API, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.ContentType = runtime.ContentTypeProtobuf
	cfg.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	cfg.NegotiatedSerializer = serializer.NewCodecFactory(newScheme()).WithoutConversion()
	cfg.WarningHandler = rest.NoWarnings{}
	cfg.Wrap(listenTo)
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	a := &API{http: client}
	// Both go over one connection.
	for _, group := range []struct {
		client **rest.RESTClient
		path   string
		gv     schema.GroupVersion
	}{
		{&a.core, "/api", corev1.SchemeGroupVersion},
		{&a.discovery, "/apis", discoveryv1.SchemeGroupVersion},
	} {
		cfg.APIPath, cfg.GroupVersion = group.path, &group.gv
		if *group.client, err = rest.RESTClientForConfigAndClient(cfg, client); err != nil {
			return nil, fmt.Errorf("reach the API server: %w", err)
		}
	}
	return a, nil
}

// newScheme knows what is read and nothing else: see the package's remark on
// memory.
func newScheme() *runtime.Scheme {
	s := runtime.NewScheme()
	s.AddKnownTypes(
		corev1.SchemeGroupVersion,
		&corev1.Service{}, &corev1.ServiceList{},
		&corev1.Pod{}, &corev1.PodList{},
		&corev1.Namespace{}, &corev1.NamespaceList{},
	)
	s.AddKnownTypes(discoveryv1.SchemeGroupVersion, &discoveryv1.EndpointSlice{}, &discoveryv1.EndpointSliceList{})
	metav1.AddToGroupVersion(s, corev1.SchemeGroupVersion)
	metav1.AddToGroupVersion(s, discoveryv1.SchemeGroupVersion)
	return s
}

// attach implements [Source].
func (a *API) attach(f *feeds) func(context.Context) {
	var runs []func(context.Context)
	for _, feed := range f.services {
		runs = append(runs, follow(f, feed, kind[corev1.Service, service]{
			a.core, "services", func() runtime.Object { return new(corev1.ServiceList) }, newService,
		}))
	}
	for _, feed := range f.slices {
		runs = append(runs, follow(f, feed, kind[discoveryv1.EndpointSlice, slice]{
			a.discovery, "endpointslices", func() runtime.Object { return new(discoveryv1.EndpointSliceList) }, newSlice,
		}))
	}
	if f.pods != nil {
		runs = append(runs, follow(f, f.pods, kind[corev1.Pod, pod]{
			a.core, "pods", func() runtime.Object { return new(corev1.PodList) }, newPod,
		}))
	}
	if f.namespaces != nil {
		runs = append(runs, follow(f, f.namespaces, kind[corev1.Namespace, namespace]{
			a.core, "namespaces", func() runtime.Object { return new(corev1.NamespaceList) }, newNamespace,
		}))
	}
	return func(ctx context.Context) {
		var watches sync.WaitGroup
		for _, run := range runs {
			watches.Go(func() { run(ctx) })
		}
		watches.Wait()
		utilnet.CloseIdleConnectionsFor(a.http.Transport)
	}
}
