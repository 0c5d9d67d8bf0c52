package lab

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"
)

// ClientConfig is how a client asks.
type ClientConfig struct {
	Server   netip.AddrPort
	Interval time.Duration
	Timeout  time.Duration
	// Name gives the question of each query, from 0; its type is A.
	Name func(seq int) string
	// Observe, if set, is called with each outcome as it is known, one at a time.
	Observe func(Outcome)
}

// Client asks over UDP on an interval, whether earlier queries have been
// answered or not, each once. A PinnedClient does so from one source port for
// ever, as Envoy's resolver does; a FreshClient from a new port each time.
type Client struct {
	cfg      ClientConfig
	exchange func(ctx context.Context, query []byte) ([]byte, error)
	close    func() error

	mu       sync.Mutex
	timeline Timeline
}

// NewFreshClient returns a client in the namespace that uses a new socket, and
// so a new source port, for each query.
func NewFreshClient(ns *Namespace, cfg ClientConfig) *Client {
	return &Client{
		cfg: cfg,
		exchange: func(ctx context.Context, query []byte) ([]byte, error) {
			return Exchange(ctx, ns, "udp", cfg.Server, query)
		},
		close: func() error { return nil },
	}
}

// PinnedClient is a Client with one source port.
type PinnedClient struct {
	*Client
	Local netip.AddrPort // its one source address
}

// NewPinnedClient returns a client in the namespace that keeps one socket.
// Close it.
func NewPinnedClient(ctx context.Context, ns *Namespace, cfg ClientConfig) (*PinnedClient, error) {
	conn, err := ns.Dial(ctx, "udp", cfg.Server.String())
	if err != nil {
		return nil, err
	}
	p := newPinnedSocket(conn)
	return &PinnedClient{
		Client: &Client{cfg: cfg, exchange: p.exchange, close: p.close},
		Local:  conn.LocalAddr().(*net.UDPAddr).AddrPort(),
	}, nil
}

// Run asks until ctx is done, waits for the queries in flight (at most the
// timeout) and returns every outcome. A client runs once.
func (c *Client) Run(ctx context.Context) Timeline {
	var inFlight sync.WaitGroup
	tick := time.NewTicker(c.cfg.Interval)
	defer tick.Stop()
	for seq := 0; ctx.Err() == nil; seq++ {
		inFlight.Go(func() { c.ask(context.WithoutCancel(ctx), seq) })
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	inFlight.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	slices.SortFunc(c.timeline, func(a, b Outcome) int { return cmp.Compare(a.Seq, b.Seq) })
	return c.timeline
}

// ask sends one query and records what becomes of it.
func (c *Client) ask(ctx context.Context, seq int) {
	o := Outcome{Seq: seq, Name: c.cfg.Name(seq), Sent: time.Now()}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	query := new(dns.Msg).SetQuestion(o.Name, dns.TypeA)
	// Consecutive ids: a socket with many queries in flight never has two of one.
	query.Id = uint16(seq)
	packed, err := query.Pack()
	if err == nil {
		var reply []byte
		if reply, err = c.exchange(ctx, packed); err == nil {
			err = verify(query, reply)
		}
	}
	o.Took, o.Err = time.Since(o.Sent), classify(err)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.timeline = append(c.timeline, o)
	if c.cfg.Observe != nil {
		c.cfg.Observe(o)
	}
}

// Close closes the client's socket; Run must have returned.
func (c *Client) Close() error { return c.close() }

// verify accepts an answer with data to exactly the question.
func verify(query *dns.Msg, packed []byte) error {
	var reply dns.Msg
	if err := reply.Unpack(packed); err != nil {
		return fmt.Errorf("unpack answer: %w", err)
	}
	switch {
	case !reply.Response, reply.Id != query.Id, len(reply.Question) != 1, reply.Question[0] != query.Question[0]:
		return ErrMismatch
	case reply.Rcode != dns.RcodeSuccess:
		return RcodeError(reply.Rcode)
	case len(reply.Answer) == 0:
		return ErrMismatch
	}
	return nil
}

// classify replaces what the net package says by the errors of Outcome.
func classify(err error) error {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return ErrTimeout
	case errors.Is(err, syscall.ECONNREFUSED):
		return ErrRefused
	}
	return err
}

// Exchange sends one packed query from a new socket in the namespace, over
// "udp" or "tcp", and returns the first answer with its id. The deadline is
// ctx's; a timeout is ErrTimeout, an ICMP or TCP refusal ErrRefused.
func Exchange(ctx context.Context, ns *Namespace, network string, server netip.AddrPort, query []byte) ([]byte, error) {
	conn, err := ns.Dial(ctx, network, server.String())
	if err != nil {
		return nil, classify(err)
	}
	defer func() { _ = conn.Close() }()
	// Without a deadline of ctx this is the zero time: none.
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	reply, err := roundTrip(conn, strings.HasPrefix(network, "tcp"), query)
	if ctxErr := ctx.Err(); err != nil && errors.Is(ctxErr, context.Canceled) {
		err = ctxErr // not a timeout, although the deadline was used to end it
	}
	return reply, classify(err)
}

// roundTrip writes the query and reads until an answer has its id.
func roundTrip(conn net.Conn, stream bool, query []byte) ([]byte, error) {
	if stream { // RFC 1035 section 4.2.2
		query = append(binary.BigEndian.AppendUint16(nil, uint16(len(query))), query...)
	}
	if _, err := conn.Write(query); err != nil {
		return nil, err
	}
	if stream {
		query = query[2:]
	}
	buf := make([]byte, dns.MaxMsgSize)
	for {
		n, err := readMessage(conn, stream, buf)
		if err != nil {
			return nil, err
		}
		if n >= 2 && buf[0] == query[0] && buf[1] == query[1] {
			return slices.Clip(buf[:n]), nil
		}
	}
}

func readMessage(conn net.Conn, stream bool, buf []byte) (int, error) {
	if !stream {
		return conn.Read(buf)
	}
	var size [2]byte
	if _, err := io.ReadFull(conn, size[:]); err != nil {
		return 0, err
	}
	return io.ReadFull(conn, buf[:binary.BigEndian.Uint16(size[:])])
}

// Ask asks for a name once, from a new socket, and returns the whole answer.
func Ask(ctx context.Context, ns *Namespace, network string, server netip.AddrPort, name string, qtype uint16) (*dns.Msg, error) {
	query, err := new(dns.Msg).SetQuestion(dns.Fqdn(name), qtype).SetEdns0(ednsSize, false).Pack()
	if err != nil {
		return nil, fmt.Errorf("pack query for %s: %w", name, err)
	}
	packed, err := Exchange(ctx, ns, network, server, query)
	if err != nil {
		return nil, fmt.Errorf("ask %v over %s for %s: %w", server, network, name, err)
	}
	reply := new(dns.Msg)
	if err := reply.Unpack(packed); err != nil {
		return nil, fmt.Errorf("unpack answer of %v for %s: %w", server, name, err)
	}
	return reply, nil
}
