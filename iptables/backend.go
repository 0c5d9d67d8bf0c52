package iptables

import (
	"errors"
	"fmt"
	"io/fs"
	"time"
)

// Backend is the means by which packets are taken.
type Backend string

// The backends. Auto is nftables where the kernel has what it needs, else
// iptables.
const (
	Auto     Backend = "auto"
	NFTables Backend = "nftables" // over netlink; Linux 5.2, with rules that end with the process from 5.12
	IPTables Backend = "iptables" // iptables-restore and ip6tables-restore with xt_socket; Linux 3.11
)

func (b Backend) known() bool { return b == Auto || b == NFTables || b == IPTables }

// kernel is where a rule set goes.
type kernel interface {
	// ensure makes the kernel carry exactly the rule set, atomically, and
	// reports whether something that had been there was gone. It costs next to
	// nothing when nothing has changed.
	ensure(RuleSet) (repaired bool, err error)
	// alive returns those of the services from which an answer has left within
	// the timeout, and how long that still counts. It waits for nothing that
	// ensure may be waiting for, and may be called while it runs.
	alive([]Service) (map[Service]time.Duration, error)
	// close removes what is the process's own. No other call may be under way.
	close() error
}

// clientKernel is a kernel that sees clients apart.
type clientKernel interface {
	// taken returns how many datagrams and connection attempts of each client
	// were taken, since it was seen first or its count began anew, which it does
	// every few minutes.
	taken() (map[Client]uint64, error)
	// bypass lets clients' packets pass for some time, from the next ensure on.
	bypass(map[Client]time.Duration) error
}

// support is what a probe has found out.
type support struct {
	reason string // what works, or why it does not
	owner  bool   // nftables: tables can belong to a socket
	err    error  // nil: supported
}

// selector chooses the backend. It keeps what the kernel has said for certain;
// a probe that failed for another reason is done anew next time.
type selector struct {
	probes map[Backend]func(RuleSet) support
	known  map[Backend]support
}

func newSelector(probes map[Backend]func(RuleSet) support) *selector {
	return &selector{probes: probes, known: make(map[Backend]support)}
}

// choose returns the wanted backend, or for Auto the first that works, with the
// reason. The error wraps ErrNotSupported if none does and that is certain.
func (s *selector) choose(want Backend, rs RuleSet) (Backend, support, error) {
	candidates := []Backend{NFTables, IPTables}
	if want != Auto {
		candidates = []Backend{want}
	}
	var reasons []error
	for _, b := range candidates {
		found, ok := s.known[b]
		if !ok {
			found = s.probes[b](rs)
			if found.err == nil || errors.Is(found.err, ErrNotSupported) {
				s.known[b] = found
			}
		}
		switch {
		case found.err == nil:
			for _, r := range reasons {
				found.reason += fmt.Sprintf("; %v", r)
			}
			return b, found, nil
		case errors.Is(found.err, fs.ErrPermission):
			return "", support{}, &ConfigError{
				Key: "intercept.mode", Problem: "the process may not change the node's network", Err: found.err,
				Remedy: "give the container the capability NET_ADMIN and the host's network, or set intercept.mode to none",
			}
		case !errors.Is(found.err, ErrNotSupported):
			// A passing failure must not make us settle for less.
			return "", support{}, fmt.Errorf("probe the backend %s: %w", b, found.err)
		}
		reasons = append(reasons, fmt.Errorf("%s: %w", b, found.err))
	}
	return "", support{}, &ConfigError{
		Key: "intercept.backend", Problem: "the kernel lacks what " + string(want) + " needs", Err: errors.Join(reasons...),
		Remedy: "nftables needs Linux 5.2 with CONFIG_NFT_SOCKET, iptables needs CONFIG_NETFILTER_XT_MATCH_SOCKET and XT_MATCH_RECENT with iptables-restore in the path; or set intercept.mode to none",
	}
}
