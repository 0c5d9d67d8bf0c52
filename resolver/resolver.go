package resolver

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dnsguard/dnsguard/resolver/cache"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// Forwarder answers questions that the cache cannot. Exchange returns an
// answer to exactly this question or an error, within its own total deadline.
type Forwarder interface {
	Exchange(ctx context.Context, q upstream.Question) (upstream.Answer, error)
}

// Limits bound what is held for clients.
type Limits struct {
	InFlight          int // questions under way; a search-list walk counts as two
	InFlightPerClient int // of one client address, once half of InFlight is taken
	Conns             int // TCP connections
	ConnsPerClient    int // of one client address
}

// Config is what a Resolver is made of; every field is needed.
type Config struct {
	Cache     *cache.Cache
	Forwarder Forwarder
	Settings
}

// Settings are what Reconfigure can change.
type Settings struct {
	Limits     Limits
	StaleAfter time.Duration // how long a client waits before it gets a stale answer; 1.2 s
	Total      time.Duration // how long a search-list walk may take; 1.5 s
	Prefetch   bool
	Search     *Search // nil: walks are left to the clients
	// AAAAZone, a folded wire-form name, keeps IPv6 addresses to the names
	// at and below it: others have none, and nobody is asked. nil: all names
	// may have them.
	AAAAZone []byte
}

func (s *Settings) validate() error {
	for name, n := range map[string]int{
		"InFlight": s.Limits.InFlight, "InFlightPerClient": s.Limits.InFlightPerClient,
		"Conns": s.Limits.Conns, "ConnsPerClient": s.Limits.ConnsPerClient,
	} {
		if n < 1 {
			return fmt.Errorf("resolver: Limits.%s is %d, must be at least 1", name, n)
		}
	}
	if s.StaleAfter <= 0 {
		return fmt.Errorf("resolver: StaleAfter is %v, must be positive", s.StaleAfter)
	}
	if s.Total <= 0 {
		return fmt.Errorf("resolver: Total is %v, must be positive", s.Total)
	}
	return nil
}

// Resolver serves endpoints.
type Resolver struct {
	cache      *cache.Cache
	forwarder  atomic.Pointer[Forwarder]
	staleAfter atomic.Int64
	total      atomic.Int64
	prefetch   atomic.Bool
	aaaaZone   atomic.Pointer[[]byte]
	draining   atomic.Bool
	seed       maphash.Seed // of client addresses' hashes

	flights flights
	walks   *walks
	conns   conns
	buffers sync.Pool // *[]byte, for answers of flights and over TCP

	// ctx ends flights that Shutdown will not wait for.
	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup // flights

	flown  counters // of flights
	framed counters // of TCP connections

	mu      sync.Mutex
	serving map[*Endpoint]*service
	gone    Stats  // of endpoints that were removed
	stuck   uint64 // sockets closed by CloseStuck
	canary  canary
}

// service is an endpoint being served.
type service struct {
	readers   []*udpReader
	acceptors []*acceptor
	leaving   atomic.Bool
	udp       sync.WaitGroup // readers
	tcp       sync.WaitGroup // acceptors and connections
}

// New returns a Resolver that serves nothing yet.
func New(c Config) (*Resolver, error) {
	if c.Cache == nil || c.Forwarder == nil {
		return nil, errors.New("resolver: Cache and Forwarder are needed")
	}
	r := &Resolver{cache: c.Cache, serving: map[*Endpoint]*service{}, walks: newWalks(), seed: maphash.MakeSeed()}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	r.flights.byKey = map[string]*flight{}
	r.flights.perClient = map[netip.Addr]load{}
	r.conns.open = map[*tcpConn]*Endpoint{}
	r.conns.perClient = map[netip.Addr]int{}
	r.conns.working = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2))
	r.buffers.New = func() any { b := make([]byte, 2, 2048); return &b }
	r.gone.Duration = Histogram{Bounds: durationBounds[:], Counts: make([]uint64, len(durationBounds)+1)}
	if err := r.Reconfigure(c.Forwarder, c.Settings); err != nil {
		return nil, err
	}
	return r, nil
}

// Reconfigure changes the forwarder and the settings for all queries to come.
// Flights under way end with the forwarder that they started with: the caller
// closes it after its total deadline.
func (r *Resolver) Reconfigure(f Forwarder, s Settings) error {
	if err := s.validate(); err != nil {
		return err
	}
	r.forwarder.Store(&f)
	r.staleAfter.Store(int64(s.StaleAfter))
	r.total.Store(int64(s.Total))
	r.walks.search.Store(s.Search)
	r.aaaaZone.Store(&s.AAAAZone)
	r.prefetch.Store(s.Prefetch)
	r.flights.mu.Lock()
	r.flights.limits = s.Limits
	r.flights.mu.Unlock()
	r.conns.mu.Lock()
	r.conns.limits = s.Limits
	r.conns.mu.Unlock()
	return nil
}

// Serve starts to serve the endpoint, whose sockets are the resolver's from
// now on.
func (r *Resolver) Serve(ep *Endpoint) error {
	svc := &service{}
	for _, conn := range ep.UDP {
		u, err := newUDPReader(r, conn, len(ep.UDP))
		if err != nil {
			return fmt.Errorf("serve %v: %w", ep.Addr, err)
		}
		svc.readers = append(svc.readers, u)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.draining.Load() {
		return fmt.Errorf("serve %v: %w", ep.Addr, net.ErrClosed)
	}
	if _, ok := r.serving[ep]; ok {
		return fmt.Errorf("serve %v: already served", ep.Addr)
	}
	r.serving[ep] = svc
	for _, u := range svc.readers {
		svc.udp.Go(u.run)
	}
	for _, l := range ep.TCP {
		a := &acceptor{l: l}
		svc.acceptors = append(svc.acceptors, a)
		svc.tcp.Go(func() { r.accept(svc, ep, a) })
	}
	return nil
}

// Remove stops to serve the endpoint, answers what it had received, and closes
// its sockets. When ctx ends first, it cuts the TCP connections.
func (r *Resolver) Remove(ctx context.Context, ep *Endpoint) error {
	r.mu.Lock()
	svc, ok := r.serving[ep]
	r.mu.Unlock()
	if !ok {
		return fmt.Errorf("remove %v: not served", ep.Addr)
	}
	return r.leave(ctx, map[*Endpoint]*service{ep: svc}, func() {})
}

// Shutdown stops to serve all endpoints: it takes the sockets out of the
// kernel's choice, answers every query that had been received, and closes
// everything. When ctx ends first, what is still waiting is answered SERVFAIL,
// and the context's error returned.
func (r *Resolver) Shutdown(ctx context.Context) error {
	r.mu.Lock()
	r.draining.Store(true)
	all := make(map[*Endpoint]*service, len(r.serving))
	maps.Copy(all, r.serving)
	r.mu.Unlock()
	err := r.leave(ctx, all, r.cancel)
	r.cancel()
	if !errors.Is(err, errStuck) {
		r.running.Wait()
	}
	return err
}

// stuckGrace is how long what is under way has to end once its context has.
const stuckGrace = time.Second

var errStuck = errors.New("a reader stands still")

// leave ends the services: first nothing new comes in, then what came in is
// answered, then the sockets are closed. When ctx ends first, expired is called,
// nothing more is read from connections, and what is under way is waited for a
// little longer: it ends in any case, by the forwarder's deadline or its context,
// but for clients that do not take their answers.
func (r *Resolver) leave(ctx context.Context, services map[*Endpoint]*service, expired func()) error {
	for ep, svc := range services {
		svc.leaving.Store(true)
		for _, c := range ep.UDP {
			// If the kernel will not, datagrams that come between the
			// last read and the close go unanswered, as with any server.
			_ = leaveGroup(c)
			_ = c.SetReadDeadline(time.Unix(1, 0)) // wakes the reader, which drains
		}
		for _, l := range ep.TCP {
			_ = l.SetDeadline(time.Now().Add(drainRead))
		}
	}
	r.conns.each(services, (*tcpConn).startDrain)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, svc := range services {
			svc.udp.Wait()
			svc.tcp.Wait()
			for _, u := range svc.readers {
				u.owed.Wait()
			}
		}
	}()
	var err error
	select {
	case <-done:
	case <-ctx.Done():
		err = ctx.Err()
		expired()
		r.conns.each(services, (*tcpConn).stop)
		if !within(stuckGrace, done) {
			r.conns.each(services, (*tcpConn).giveUp)
			if !within(stuckGrace, done) { // a goroutine stands still: leave it behind
				err = errors.Join(err, errStuck)
			}
		}
	}
	for ep := range services {
		if errors.Is(err, errStuck) {
			go func() { _ = ep.Close() }() // waits for whoever uses the descriptors
			continue
		}
		_ = ep.Close()
	}
	r.forget(services)
	return err
}

// within reports whether done is closed before the time is up.
func within(d time.Duration, done <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}

// forget keeps the counts of services that have ended.
func (r *Resolver) forget(services map[*Endpoint]*service) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for ep, svc := range services {
		if r.serving[ep] != svc {
			continue // left by another caller at the same time
		}
		for _, u := range svc.readers {
			r.gone.add(&u.c)
		}
		delete(r.serving, ep)
	}
}

// Stats returns the counters, summed over all goroutines, and the state.
func (r *Resolver) Stats() Stats {
	r.mu.Lock()
	s := r.gone
	s.Stuck = r.stuck
	s.Duration.Counts = append([]uint64(nil), r.gone.Duration.Counts...)
	for ep, svc := range r.serving {
		d := SocketDrops{Address: ep.Addr.String()}
		for _, u := range svc.readers {
			s.add(&u.c)
			d.Drops += socketDrops(u.conn)
		}
		s.Drops = append(s.Drops, d)
	}
	r.mu.Unlock()
	s.add(&r.flown)
	s.add(&r.framed)
	for kind := range r.walks.done {
		for res := range r.walks.done[kind] {
			s.Walks[kind][res] = r.walks.done[kind][res].Load()
		}
	}
	r.flights.mu.Lock()
	s.InFlight, s.Waiters = len(r.flights.byKey), r.flights.waiters
	r.flights.mu.Unlock()
	r.conns.mu.Lock()
	s.Conns = len(r.conns.open)
	r.conns.mu.Unlock()
	return s
}
