package kube

import (
	"cmp"
	"net/netip"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dnsguard/dnsguard/resolver/search"
)

// The annotations that pods and namespaces may carry.
const (
	interceptAnnotation = "dnsguard.io/intercept" // "false": leave the pod's queries alone
	expandAnnotation    = "dnsguard.io/expand"    // "true", on namespaces: walk for clients that do not
)

// pod is what is kept of a Pod.
type pod struct {
	addrs    []netip.Addr
	phase    corev1.PodPhase
	started  time.Time // when the kubelet took it up
	created  time.Time
	deleting bool

	dns       search.Pod
	unclear   bool    // what its libc makes of its dnsConfig cannot be told
	intercept *string // its annotation
}

func newPod(o *corev1.Pod) pod {
	p := pod{
		phase:    o.Status.Phase,
		created:  o.CreationTimestamp.Time,
		deleting: o.DeletionTimestamp != nil,
		dns: search.Pod{
			Namespace:   o.Namespace,
			HostNetwork: o.Spec.HostNetwork,
			DNSPolicy:   search.DNSPolicy(o.Spec.DNSPolicy),
		},
	}
	p.started = p.created
	if o.Status.StartTime != nil {
		p.started = o.Status.StartTime.Time
	}
	for _, ip := range o.Status.PodIPs {
		if a, ok := parseAddr(ip.IP); ok {
			p.addrs = appendNew(p.addrs, a)
		}
	}
	if len(p.addrs) == 0 {
		p.addrs = parseAddrs([]string{o.Status.PodIP})
	}
	if v, ok := o.Annotations[interceptAnnotation]; ok {
		p.intercept = &v
	}
	if c := o.Spec.DNSConfig; c != nil {
		p.dns.Searches = append(p.dns.Searches, c.Searches...)
		for _, opt := range c.Options {
			p.option(opt)
		}
	}
	return p
}

// option takes one of dnsConfig's options. The kubelet writes them into
// resolv.conf as they are, a later one instead of an earlier one of the same
// name; with values that are no numbers each libc does as it likes.
func (p *pod) option(o corev1.PodDNSConfigOption) {
	switch {
	case o.Name == "ndots" && o.Value == nil:
		libc := 1 // the option without a value is none, and replaces the kubelet's
		p.dns.NDots = &libc
	case o.Name == "ndots":
		n, err := strconv.ParseUint(*o.Value, 10, 31)
		if err != nil {
			p.unclear = true
			return
		}
		ndots := int(n)
		p.dns.NDots = &ndots
	case strings.HasPrefix(o.Name, "ndots:"):
		p.unclear = true
	}
}

// has tells whether the pod has its addresses for itself alone, now. A pod that
// is Pending and has addresses runs its init containers.
func (p *pod) has() bool {
	return p.phase != corev1.PodSucceeded && p.phase != corev1.PodFailed
}

// newer compares two pods that claim the same address: positive if p has come
// to it later than q, 0 if that cannot be told. An address is given to another
// pod while the API still shows the one before as running; the kubelet's clock
// has whole seconds.
func (p *pod) newer(q *pod) int {
	return cmp.Or(p.started.Compare(q.started), boolCompare(q.deleting, p.deleting), p.created.Compare(q.created))
}

func boolCompare(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

// excluded tells whether a pod is not to be intercepted. Its own annotation
// has the last word over its namespace's.
func (p *pod) excluded(ns namespace) bool {
	if p.intercept != nil {
		return *p.intercept == "false"
	}
	return ns.exclude
}

// namespace is what is kept of a Namespace.
type namespace struct {
	exclude bool
	expand  bool
}

func newNamespace(o *corev1.Namespace) namespace {
	return namespace{
		exclude: o.Annotations[interceptAnnotation] == "false",
		expand:  o.Annotations[expandAnnotation] == "true",
	}
}
