package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/miekg/dns"
)

// Load is an open-loop generator: it sends each query when it is due, whether
// or not earlier ones have been answered, and measures latency from that
// moment, so that a server that stalls is not spared the queries of its stall.
//
// It runs on one thread with one epoll instance and no goroutine per query.
type Load struct {
	Server  netip.AddrPort
	TCP     bool
	Rate    int // queries per second
	Queries int // how many in all: the load is bounded
	// Sockets is how many sockets, and so source ports, share the load and
	// stay for its whole length (a TCP connection that breaks is opened again).
	// 0 means a new one for each query.
	Sockets int
	Names   []string // asked in turn
	Type    uint16   // of every query; 0 means A
	// Unique puts the query's number before the name as a label of its own, so
	// that no name is asked twice.
	Unique  bool
	Timeout time.Duration // after which a query is lost; 0 means 2 s
}

const (
	defaultLoadTimeout = 2 * time.Second
	// idSpace is the number of message ids, and so the bound of queries in flight.
	idSpace = 1 << 16
	// uniqueDigits is the length of a Unique label.
	uniqueDigits = 8
)

// Run generates the load from inside the namespace, until every query is
// answered or lost, or ctx is done. What has been counted is returned in both
// cases.
func (l Load) Run(ctx context.Context, ns *Namespace) (*LoadResult, error) {
	if l.Type == 0 {
		l.Type = dns.TypeA
	}
	if l.Timeout == 0 {
		l.Timeout = defaultLoadTimeout
	}
	if err := l.check(); err != nil {
		return nil, fmt.Errorf("load on %v: %w", l.Server, err)
	}
	templates, err := l.templates()
	if err != nil {
		return nil, fmt.Errorf("load on %v: %w", l.Server, err)
	}
	var r *LoadResult
	err = ns.Do(func() error {
		g, err := newGenerator(l, templates)
		if err != nil {
			return err
		}
		defer g.close()
		r = g.result
		return g.run(ctx)
	})
	if err != nil {
		return r, fmt.Errorf("load on %v: %w", l.Server, err)
	}
	return r, nil
}

func (l Load) check() error {
	switch {
	case !l.Server.IsValid():
		return errors.New("no server")
	case l.Rate <= 0 || l.Queries <= 0:
		return errors.New("rate and number of queries must be positive")
	case l.Sockets < 0:
		return errors.New("negative number of sockets")
	case len(l.Names) == 0:
		return errors.New("no names")
	case float64(l.Rate)*l.Timeout.Seconds() >= idSpace:
		return fmt.Errorf("%d queries a second for %v are more in flight than there are message ids", l.Rate, l.Timeout)
	}
	return nil
}

// templates packs one query per name, with id 0.
func (l Load) templates() ([][]byte, error) {
	var out [][]byte
	for _, name := range l.Names {
		if l.Unique {
			name = fmt.Sprintf("%0*d.%s", uniqueDigits, 0, name)
		}
		packed, err := new(dns.Msg).SetQuestion(dns.Fqdn(name), l.Type).Pack()
		if err != nil {
			return nil, fmt.Errorf("pack query for %s: %w", name, err)
		}
		out = append(out, packed)
	}
	return out, nil
}
