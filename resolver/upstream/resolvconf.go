package upstream

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"
)

const (
	// pollInterval is how often a watched file is read. It is small, and
	// reading it sees what inotify does not: a swapped symlink in the path,
	// a bind mount, a file that was not there.
	pollInterval = 2 * time.Second
	dnsPort      = 53
)

// parseResolvConf returns the nameservers of a resolv.conf(5), in order, each
// once. What is not an address is skipped, as libc does. The unspecified
// address means this host there.
func parseResolvConf(text []byte) []netip.AddrPort {
	var servers []netip.AddrPort
	for line := range bytes.Lines(text) {
		fields := strings.Fields(string(line))
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		addr, err := netip.ParseAddr(fields[1])
		if err != nil {
			continue
		}
		switch addr = addr.Unmap(); addr {
		case netip.IPv4Unspecified():
			addr = netip.AddrFrom4([4]byte{127, 0, 0, 1})
		case netip.IPv6Unspecified():
			addr = netip.IPv6Loopback()
		}
		if s := netip.AddrPortFrom(addr, dnsPort); !slices.Contains(servers, s) {
			servers = append(servers, s)
		}
	}
	return servers
}

// watch keeps a route's servers in step with a file.
type watch struct {
	f      *Forwarder
	route  *route
	source int // its place among the route's sources
	file   string
	text   []byte
	failed string // the last error that was told
}

// readFiles reads every watched file for the first time.
func (f *Forwarder) readFiles() ([]*watch, error) {
	var watches []*watch
	for _, r := range f.all {
		for i, s := range r.sources {
			if s.File == "" {
				continue
			}
			w := &watch{f: f, route: r, source: i, file: s.File}
			servers, err := w.read()
			if err != nil {
				return nil, err
			}
			r.files[i] = servers
			watches = append(watches, w)
		}
	}
	return watches, nil
}

// read returns the file's nameservers that are not ourselves.
func (w *watch) read() ([]netip.AddrPort, error) {
	text, err := os.ReadFile(w.file)
	if err != nil {
		return nil, fmt.Errorf("read nameservers: %w", err)
	}
	w.text = text
	servers := parseResolvConf(text)
	if len(servers) == 0 {
		return nil, fmt.Errorf("%s: %w", w.file, ErrNoServers)
	}
	self := w.f.config.Self
	others := slices.DeleteFunc(slices.Clone(servers), func(a netip.AddrPort) bool { return self != nil && self(a) })
	if len(others) == 0 {
		return nil, fmt.Errorf("%s: %w: %v is %w", w.file, ErrNoServers, servers[0], errSelf)
	}
	return others, nil
}

// run polls the file until the Forwarder is closed.
func (w *watch) run() {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			w.poll()
		case <-w.f.ctx.Done():
			return
		}
	}
}

// poll reads the file. As long as it gives no servers the old ones stay.
func (w *watch) poll() {
	before := w.text
	servers, err := w.read()
	tell := w.f.config.OnServers
	if err != nil {
		if tell != nil && err.Error() != w.failed {
			tell(w.file, nil, err)
		}
		w.failed = err.Error()
		return
	}
	if w.failed == "" && bytes.Equal(before, w.text) {
		return
	}
	w.failed = ""
	w.f.mu.Lock()
	same := slices.Equal(w.route.files[w.source], servers)
	w.route.files[w.source] = servers
	w.f.mu.Unlock()
	if same {
		return
	}
	w.f.resolveServers()
	if tell != nil {
		tell(w.file, servers, nil)
	}
}
