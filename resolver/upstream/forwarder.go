package upstream

import (
	"context"
	"fmt"
	"hash/maphash"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Forwarder asks upstream servers. Its methods may be called at the same time.
type Forwarder struct {
	config    Config
	base      time.Time // instants are counted from here
	routes    routes
	seed      maphash.Seed
	exchanges sync.Pool // *exchange
	received  sync.Pool // *received
	batches   sync.Pool // *batch

	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	closed  atomic.Bool
	running sync.WaitGroup // goroutines of sockets and watchers

	mu       sync.Mutex
	all      []*route
	servers  map[netip.AddrPort]*server
	departed []*server // named by no route any more, perhaps with sockets open
}

// New returns a Forwarder. It fails if the configuration is wrong, if a static
// server is an address of our own, or if a watched file has no nameserver that
// is not (ErrNoServers). No question is sent before the first Exchange.
func New(c Config) (*Forwarder, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("upstream: %w", err)
	}
	f := &Forwarder{
		config:  c,
		base:    time.Now(),
		seed:    maphash.MakeSeed(),
		routes:  make(routes),
		servers: make(map[netip.AddrPort]*server),
	}
	f.exchanges.New = func() any { return newExchange(f) }
	f.received.New = func() any { return new(received) }
	f.batches.New = func() any { return newBatch() }
	for i, cr := range c.Routes {
		r := &route{
			protocol: cr.Protocol, sources: cr.Servers, budget: newBudget(c.Budget),
			gate:  gate{now: f.now, wait: min(gateWait, c.Timeouts.Total/3)},
			files: make(map[int][]netip.AddrPort),
		}
		if err := f.routes.add(cr.Zones, r); err != nil {
			return nil, fmt.Errorf("upstream: route %d: %w", i, err)
		}
		f.all = append(f.all, r)
	}
	watches, err := f.readFiles()
	if err != nil {
		return nil, fmt.Errorf("upstream: %w", err)
	}
	f.resolveServers()
	f.ctx, f.cancel = context.WithCancel(context.Background())
	for _, w := range watches {
		f.running.Go(w.run)
	}
	return f, nil
}

// now returns the present instant.
func (f *Forwarder) now() time.Duration { return time.Since(f.base) }

// Exchange asks the servers that are responsible for the question's name and
// returns the first good answer, or the error answer (SERVFAIL, REFUSED, ...)
// that there is instead. It returns within Timeouts.Total, or when ctx ends.
// The error is always an *Error.
func (f *Forwarder) Exchange(ctx context.Context, q Question) (Answer, error) {
	r := f.routes.match(q.Name)
	switch {
	case f.closed.Load():
		return Answer{}, &Error{Reason: Closed}
	case r == nil:
		return Answer{}, &Error{Reason: NoServers}
	}
	start := f.now()
	slot := r.gate.enter(ctx)
	defer r.gate.leave(slot)
	q.Waited += f.now() - start
	x := f.exchanges.Get().(*exchange)
	x.begin(r, &q)
	x.run(ctx)
	ans, err := x.answer(), x.err
	x.reset() // run has finished it
	f.exchanges.Put(x)
	return ans, err
}

// Close closes every socket, ends every exchange with reason Closed, and waits
// until nothing of the Forwarder runs any more. Who replaces a Forwarder by
// another gives its exchanges Timeouts.Total to end before.
func (f *Forwarder) Close() error {
	if f.closed.Swap(true) {
		return nil
	}
	f.cancel()
	f.eachConn(func(*conn) bool { return true }, func(c *conn) { c.close(errClosed) })
	f.running.Wait()
	return nil
}

// RetireSockets retires the UDP sockets that match: they take no more
// questions, and the questions in flight on them are sent again over others,
// while their own answers are still welcome. It returns how many it retired, with
// those that took no more questions because of their age but were waited for. It
// is for those who know that a socket's packets lead nowhere, such as one who
// deletes its flow from the connection tracker. match must not block.
func (f *Forwarder) RetireSockets(match func(local, remote netip.AddrPort) bool) int {
	type retired struct {
		*conn
		fresh bool // not retired before, by its age
	}
	var chosen []retired
	// All before anybody is told: who asks again must not meet one that is next.
	f.eachConn(
		func(c *conn) bool {
			return c.tr == UDP && c.nc != nil && match(c.local, c.srv.addr)
		},
		func(c *conn) {
			c.srv.mu.Lock()
			defer c.srv.unlock()
			if !c.closed {
				chosen = append(chosen, retired{c, !c.retired})
				c.retire()
			}
		})
	n := 0
	for _, c := range chosen {
		c.srv.mu.Lock()
		// One that its age has retired may still be waited for.
		if told := c.tellAll(socketRetired); c.fresh || told > 0 {
			n++
		}
		c.srv.unlock()
	}
	return n
}

// eachConn calls do for each socket that match, which is called with the
// server's lock held, chooses.
func (f *Forwarder) eachConn(match func(*conn) bool, do func(*conn)) {
	f.mu.Lock()
	servers := slices.Concat(slices.Collect(maps.Values(f.servers)), f.departed)
	f.mu.Unlock()
	for _, s := range servers {
		s.mu.Lock()
		var chosen []*conn
		for t := range s.pools {
			for _, c := range s.pools[t].conns {
				if match(c) {
					chosen = append(chosen, c)
				}
			}
		}
		s.unlock()
		for _, c := range chosen {
			do(c)
		}
	}
}

// resolveServers gives each route the servers of its present addresses. What
// is known of a server is kept as long as a route names it. One that no route
// names any more takes no more questions; what is in flight there goes on.
func (f *Forwarder) resolveServers() {
	f.mu.Lock()
	defer f.mu.Unlock()
	named := make(map[netip.AddrPort]*server)
	for _, r := range f.all {
		var servers []*server
		for _, addr := range r.addresses() {
			s := named[addr]
			if s == nil {
				if s = f.servers[addr]; s == nil {
					s = newServer(f, addr)
				}
				named[addr] = s
			}
			servers = append(servers, s)
		}
		r.servers.Store(&servers)
	}
	f.departed = slices.DeleteFunc(f.departed, (*server).idle)
	for addr, s := range f.servers {
		if named[addr] == nil {
			f.departed = append(f.departed, s)
		}
	}
	f.servers = named
}
