package lab

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"

	"github.com/miekg/dns"
)

// pinnedSocket is one connected UDP socket shared by queries in flight.
type pinnedSocket struct {
	conn net.Conn
	read sync.WaitGroup

	mu      sync.Mutex
	waiting map[[2]byte]chan result // by message id
}

type result struct {
	reply []byte
	err   error
}

func newPinnedSocket(conn net.Conn) *pinnedSocket {
	p := &pinnedSocket{conn: conn, waiting: make(map[[2]byte]chan result)}
	p.read.Go(p.readLoop)
	return p
}

// exchange sends a query and waits for the answer with its id.
func (p *pinnedSocket) exchange(ctx context.Context, query []byte) ([]byte, error) {
	id := [2]byte(query)
	answer := make(chan result, 1)
	p.mu.Lock()
	p.waiting[id] = answer
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.waiting, id)
	}()
	if _, err := p.conn.Write(query); err != nil {
		return nil, err
	}
	select {
	case r := <-answer:
		return r.reply, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// readLoop gives each answer to the query that waits for it, until close.
func (p *pinnedSocket) readLoop() {
	buf := make([]byte, dns.MaxMsgSize)
	for {
		n, err := p.conn.Read(buf)
		switch {
		case err == nil && n >= 2:
			p.deliver([2]byte(buf), result{reply: append([]byte(nil), buf[:n]...)})
		case errors.Is(err, syscall.ECONNREFUSED):
			// An ICMP error does not say which query it answers: all fail. The
			// socket stays, as Envoy's does.
			p.refuse(result{err: err})
		case err != nil:
			return
		}
	}
}

func (p *pinnedSocket) deliver(id [2]byte, r result) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if answer, ok := p.waiting[id]; ok {
		delete(p.waiting, id)
		answer <- r
	}
}

func (p *pinnedSocket) refuse(r result) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, answer := range p.waiting {
		delete(p.waiting, id)
		answer <- r
	}
}

func (p *pinnedSocket) close() error {
	err := p.conn.Close()
	p.read.Wait()
	return err
}
