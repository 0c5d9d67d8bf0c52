package kube

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"go.yaml.in/yaml/v3"
)

// manifest is the objects of a file.
type manifest struct {
	services   []*corev1.Service
	slices     []*discoveryv1.EndpointSlice
	pods       []*corev1.Pod
	namespaces []*corev1.Namespace
}

// parser reads a manifest and collects all that is wrong with it.
type parser struct {
	manifest
	problems []error
	seen     map[string]int // the number of the document, by kind and name
}

// parseManifest reads a file's content, strictly: it is right altogether, or
// there is an error that lists what is wrong, one a line, each with document
// and line.
func parseManifest(data []byte) (*manifest, error) {
	p := parser{seen: map[string]int{}}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	for number := 1; ; number++ {
		var n yaml.Node
		err := dec.Decode(&n)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil { // the parser does not find its way to the next document
			p.problems = append(p.problems, notYAML(number, err))
			break
		}
		p.document(number, n.Content[0])
	}
	if len(p.seen) == 0 && len(p.problems) == 0 {
		return nil, errors.New("there is no object in it")
	}
	if err := errors.Join(p.problems...); err != nil {
		return nil, err
	}
	return &p.manifest, nil
}

func notYAML(number int, err error) error {
	text := err.Error()
	if m := regexp.MustCompile(`^yaml: line (\d+): (.*)`).FindStringSubmatch(text); m != nil {
		return fmt.Errorf("document %d, at or below line %s: not YAML: %s", number, m[1], m[2])
	}
	return fmt.Errorf("document %d: not YAML: %w", number, err)
}

func (p *parser) document(number int, root *yaml.Node) {
	if root.Kind == yaml.ScalarNode && root.ShortTag() == "!!null" {
		return // nothing but comments
	}
	d := &document{number: number, root: root}
	apiVersion, kind := d.text("apiVersion"), d.text("kind")
	d.title = kind
	switch apiVersion + " " + kind {
	case "v1 Service":
		decode(p, d, &p.services, true, checkService)
	case "discovery.k8s.io/v1 EndpointSlice":
		decode(p, d, &p.slices, true, checkSlice)
	case "v1 Pod":
		decode(p, d, &p.pods, true, checkPod)
	case "v1 Namespace":
		decode(p, d, &p.namespaces, false, func(*document, *corev1.Namespace) {})
	default:
		d.wrong("kind", "is %q of %q, want Service, Pod or Namespace of \"v1\", or EndpointSlice of \"discovery.k8s.io/v1\"", kind, apiVersion)
	}
	p.problems = append(p.problems, d.problems...)
}

// decode reads the document into a new object, checks it, and adds it to the
// manifest.
func decode[O any](p *parser, d *document, to *[]*O, namespaced bool, check func(*document, *O)) {
	o := new(O)
	if !d.into(o) {
		return
	}
	m := any(o).(metav1.Object)
	name := Name{m.GetNamespace(), m.GetName()}
	if name.Name == "" {
		d.wrong("metadata", "has no name")
	} else {
		d.title += " " + name.String()
	}
	if namespaced != (name.Namespace != "") {
		d.wrong("metadata", "has a namespace: %v, want: %v", name.Namespace != "", namespaced)
	}
	if before, twice := p.seen[d.title]; twice && name.Name != "" {
		d.wrong("metadata", "is the same object as document %d", before)
	}
	p.seen[d.title] = d.number
	check(d, o)
	*to = append(*to, o)
}

func checkService(d *document, o *corev1.Service) {
	ips, path := o.Spec.ClusterIPs, "spec.clusterIPs[%d]"
	if len(ips) == 0 {
		ips, path = []string{o.Spec.ClusterIP}, "spec.clusterIP"
	}
	for i, ip := range ips {
		if ip != "" && ip != corev1.ClusterIPNone {
			d.checkAddr(indexed(path, i), ip)
		}
	}
	for i, ip := range o.Spec.ExternalIPs {
		d.checkAddr(indexed("spec.externalIPs[%d]", i), ip)
	}
	for i, ing := range o.Status.LoadBalancer.Ingress {
		if ing.IP != "" {
			d.checkAddr(indexed("status.loadBalancer.ingress[%d].ip", i), ing.IP)
		}
	}
	for i, port := range o.Spec.Ports {
		d.checkPort(indexed("spec.ports[%d].port", i), port.Port)
		if port.NodePort != 0 {
			d.checkPort(indexed("spec.ports[%d].nodePort", i), port.NodePort)
		}
	}
}

// checkSlice checks a slice and fills in the defaults that an API server does.
func checkSlice(d *document, o *discoveryv1.EndpointSlice) {
	for i := range o.Ports {
		port := &o.Ports[i]
		if port.Name == nil {
			port.Name = new("")
		}
		if port.Protocol == nil {
			port.Protocol = new(corev1.ProtocolTCP)
		}
		if port.Port != nil {
			d.checkPort(indexed("ports[%d].port", i), *port.Port)
		}
	}
	switch o.AddressType {
	case discoveryv1.AddressTypeFQDN:
		return
	case discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6:
	default:
		d.wrong("addressType", "is %q, want IPv4, IPv6 or FQDN", o.AddressType)
		return
	}
	for i, e := range o.Endpoints {
		for j, text := range e.Addresses {
			path := fmt.Sprintf("endpoints[%d].addresses[%d]", i, j)
			if a, ok := parseAddr(text); ok && !isOfType(a, o.AddressType) {
				d.wrong(path, "%q is not of type %s", text, o.AddressType)
			} else {
				d.checkAddr(path, text)
			}
		}
	}
}

func checkPod(d *document, o *corev1.Pod) {
	if ip := o.Status.PodIP; ip != "" {
		d.checkAddr("status.podIP", ip)
	}
	for i, ip := range o.Status.PodIPs {
		d.checkAddr(indexed("status.podIPs[%d].ip", i), ip.IP)
	}
}

func indexed(path string, i int) string { return strings.Replace(path, "%d", strconv.Itoa(i), 1) }

func (d *document) checkAddr(path, text string) {
	if _, ok := parseAddr(text); !ok {
		d.wrong(path, "%q is not an IP address", text)
	}
}

func (d *document) checkPort(path string, n int32) {
	if _, ok := parsePort(n); !ok {
		d.wrong(path, "%d is not a port, want 1 to 65535", n)
	}
}
