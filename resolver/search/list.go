package search

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// Limits of a search list (kubelet's pkg/kubelet/network/dns: MaxDNSSearchPaths,
// DNS1123SubdomainMaxLength, MaxDNSSearchListChars) and of ndots (resolv.conf(5)).
const (
	maxDomains     = 32
	maxDomainChars = 253
	maxListChars   = 2048
	maxNDots       = 15
)

// List is a client's search list: what its libc appends to a name, and to
// which names.
type List struct {
	// Domains are folded wire-form names, in the order in which they are
	// tried.
	Domains [][]byte
	// NDots is how many dots make the client try a name as it is first.
	NDots int
	// Expand tells that the client's namespace asks for expansion.
	Expand bool
	// Inferred tells that the list was read off a qname.
	Inferred bool

	// namespaced tells that the first domain is a namespace's of the cluster.
	namespaced bool
	id         ID
}

// ID stands for the content of a list: clients with equal lists walk alike.
type ID [16]byte

// ID returns the list's identity.
func (l *List) ID() ID { return l.id }

// written returns the domains of those given that kubelet writes into a pod's
// resolv.conf: each once as it is spelled, at most 32, none too long, and no more
// than a line has room for.
func written(domains []string) []string {
	var list []string
	for _, d := range domains {
		if !slices.Contains(list, d) {
			list = append(list, d)
		}
	}
	list = list[:min(len(list), maxDomains)]
	list = slices.DeleteFunc(list, func(d string) bool { return len(d) > maxDomainChars })
	for len(strings.Join(list, " ")) > maxListChars {
		list = list[:len(list)-1]
	}
	return list
}

// asRead returns written domains in folded wire form, as libcs read them. What
// differs in case, or by a final dot, is the same to them, and nothing between two
// spaces is nothing. glibc tries the name as it is where the root stands, so the
// root as the last domain adds no name; musl 1.2.3 asks what no server can read,
// and fails, unless a name before has been found. ok is false where more depends on
// it, and for what is no name.
func asRead(domains []string) (list [][]byte, ok bool) {
	rooted := false
	for _, d := range domains {
		if d == "" {
			continue
		}
		w, err := wireName(d)
		switch {
		case err != nil:
			return nil, false
		case len(w) == 1:
			rooted = true
		case rooted:
			return nil, false
		case !slices.ContainsFunc(list, func(l []byte) bool { return bytes.Equal(l, w) }):
			list = append(list, w)
		}
	}
	return list, true
}

// seal gives the list its identity.
func (l *List) seal(p *Policy) {
	l.namespaced = p.ofNamespace(l.Domains[0])
	// A hash that cannot be steered: a tenant chooses the searches of its
	// pods, and must not be able to choose another's list.
	h := sha256.New()
	h.Write([]byte{byte(l.NDots), bit(l.Expand)})
	for _, d := range l.Domains {
		h.Write(d) // ends with the root octet
	}
	copy(l.id[:], h.Sum(nil))
}

func bit(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// DNSPolicy is a pod's dnsPolicy.
type DNSPolicy string

// The policies of the Kubernetes API.
const (
	ClusterFirst            DNSPolicy = "ClusterFirst"
	ClusterFirstWithHostNet DNSPolicy = "ClusterFirstWithHostNet"
	Default                 DNSPolicy = "Default"
	None                    DNSPolicy = "None"
)

// Pod is what decides on a pod's search list.
type Pod struct {
	Namespace   string
	HostNetwork bool
	DNSPolicy   DNSPolicy
	Searches    []string // dnsConfig.searches
	NDots       *int     // dnsConfig's option ndots
	Expand      bool     // its namespace is annotated so
}

// Config is what a Policy is made of.
type Config struct {
	ClusterDomain string   // cluster.local
	Domains       []string // the node's own search domains, after the cluster's three
	NDots         int      // of pods that do not say: 5 is kubelet's
	Expand        bool     // for every client
}

// Policy makes lists and walks.
type Policy struct {
	cluster []byte // folded wire form
	svc     []byte // svc.<cluster>
	ndots   int
	// As kubelet writes them, without final dots:
	domain string   // the cluster's
	node   []string // the node's own search domains
	expand bool
}

// New returns the policy for a node.
func New(c Config) (*Policy, error) {
	cluster, err := wireName(c.ClusterDomain)
	if err != nil {
		return nil, fmt.Errorf("cluster domain: %w", err)
	}
	p := &Policy{cluster: cluster, svc: append([]byte("\x03svc"), cluster...), ndots: c.NDots, expand: c.Expand}
	p.domain = strings.TrimSuffix(c.ClusterDomain, ".")
	if c.NDots < 0 || c.NDots > maxNDots {
		return nil, fmt.Errorf("ndots %d: from 0 to %d", c.NDots, maxNDots)
	}
	for _, d := range c.Domains {
		if w, err := wireName(d); err != nil || len(w) == 1 {
			return nil, fmt.Errorf("search domain: %q is not a domain name below the root", d)
		}
		p.node = append(p.node, strings.TrimSuffix(d, "."))
	}
	return p, nil
}

// HasNodeDomains reports whether the node's own search domains are known.
func (p *Policy) HasNodeDomains() bool { return len(p.node) > 0 }

// wireName packs a name in presentation form, relative or not.
func wireName(name string) ([]byte, error) {
	var buf [dnswire.MaxNameLen + 1]byte
	n, err := dns.PackDomainName(dns.Fqdn(strings.ToLower(name)), buf[:], 0, nil, false)
	if err != nil || n > dnswire.MaxNameLen {
		return nil, fmt.Errorf("%q is not a domain name", name)
	}
	return bytes.Clone(buf[:n]), nil
}

// ListOf returns the search list that kubelet writes for a pod, or nil if that
// cannot be known here, or libcs differ on what it means: hostNetwork pods share
// their address with the node, and a pod without a list, or with a domain that is
// no name, is left alone.
func (p *Policy) ListOf(pod Pod) *List {
	if pod.HostNetwork {
		return nil
	}
	var domains []string
	l := &List{NDots: p.ndots, Expand: p.expand || pod.Expand}
	switch pod.DNSPolicy {
	case ClusterFirst, ClusterFirstWithHostNet, "":
		ns, err := wireName(pod.Namespace)
		if err != nil || dnswire.LabelCount(ns) != 1 {
			return nil
		}
		domains = p.clusterDomains(pod.Namespace)
	case Default:
		// The host's resolv.conf, whose ndots is libc's own 1 unless it
		// says otherwise; kubelet's ClusterFirst sets 5.
		domains, l.NDots = slices.Clone(p.node), 1
	case None:
		l.NDots = 1
	default:
		return nil
	}
	var ok bool
	if l.Domains, ok = asRead(written(append(domains, pod.Searches...))); !ok || len(l.Domains) == 0 {
		return nil
	}
	if pod.NDots != nil {
		// A negative number is 15 to glibc, and none to musl.
		if l.NDots = min(*pod.NDots, maxNDots); l.NDots < 0 {
			return nil
		}
	}
	l.seal(p)
	return l
}

// Infer reads a list off a qname, in folded wire form, that ends in
// <ns>.svc.<cluster domain>: the list of a ClusterFirst pod of that namespace.
// It returns nil for other names. It allocates: keep the list.
func (p *Policy) Infer(qname []byte) *List {
	ns := p.Namespace(qname)
	if ns == nil {
		return nil
	}
	namespace, _, err := dns.UnpackDomainName(append(bytes.Clone(ns), 0), 0)
	if err != nil {
		return nil
	}
	l := &List{NDots: p.ndots, Expand: p.expand, Inferred: true}
	l.Domains, _ = asRead(written(p.clusterDomains(strings.TrimSuffix(namespace, "."))))
	if len(l.Domains) == 0 {
		return nil
	}
	l.seal(p)
	return l
}

// Namespace returns the label before svc.<cluster domain> of a qname in folded
// wire form, with its length octet, or nil if it has none.
func (p *Policy) Namespace(qname []byte) []byte {
	off, ok := p.namespaceLabel(qname)
	if !ok {
		return nil
	}
	return qname[off : off+1+int(qname[off])]
}

// ofNamespace reports whether a domain, in folded wire form, is
// <ns>.svc.<cluster domain>.
func (p *Policy) ofNamespace(domain []byte) bool {
	off, ok := p.namespaceLabel(domain)
	return ok && off == 0
}

// namespaceLabel returns the offset of the label before svc.<cluster domain>.
func (p *Policy) namespaceLabel(qname []byte) (int, bool) {
	for off := 0; off < len(qname) && qname[off] != 0; off += 1 + int(qname[off]) {
		if len(qname)-off-1-int(qname[off]) == len(p.svc) {
			return off, bytes.Equal(qname[len(qname)-len(p.svc):], p.svc)
		}
	}
	return 0, false
}

// clusterDomains returns the domains of a ClusterFirst pod: the cluster's
// three, then the node's own.
func (p *Policy) clusterDomains(namespace string) []string {
	svc := "svc." + p.domain
	return append([]string{namespace + "." + svc, svc, p.domain}, p.node...)
}
