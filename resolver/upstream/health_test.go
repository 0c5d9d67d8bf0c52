package upstream

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
)

// except returns a script that leaves some names unanswered: those whose own
// servers are dead.
func except(script func(*fakeQuery), names ...string) func(*fakeQuery) {
	return func(q *fakeQuery) {
		if !slices.Contains(names, q.Question[0].Name) {
			script(q)
		}
	}
}

// watched adds what happens to the servers' health to the configuration.
func watched(config Config) (Config, func() []Health) {
	var mu sync.Mutex
	var all []Health
	config.OnHealth = func(h Health) {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, h)
	}
	return config, func() []Health {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(all)
	}
}

var deadNames = []string{"one.dead.example.", "two.dead.example."}

// A name that nobody can answer says nothing about the server that is asked,
// however often it is asked for.
func TestDeadNames(t *testing.T) {
	const span = 10 * time.Minute
	for name, tt := range map[string]struct {
		names  int // dead
		every  time.Duration
		good   time.Duration // a good name is asked that often, if at all
		script func(*fakeQuery)
	}{
		"two names, nothing else":           {names: 2, every: 5 * time.Second, script: healthy(ms)},
		"two names, often":                  {names: 2, every: 500 * ms, script: healthy(ms)},
		"two names beside a good one":       {names: 2, every: 5 * time.Second, good: time.Minute, script: healthy(ms)},
		"twenty names":                      {names: 20, every: 5 * time.Second, good: 5 * time.Minute, script: healthy(ms)},
		"the root is refused":               {names: 5, every: 5 * time.Second, script: except(healthy(ms))},
		"a slow server":                     {names: 5, every: 5 * time.Second, good: time.Minute, script: healthy(400 * ms)},
		"a server that answers only errors": {names: 5, every: 5 * time.Second, script: answering(dns.RcodeRefused)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var dead []string
				for i := range tt.names {
					dead = append(dead, fmt.Sprintf("n%d.dead.example.", i))
				}
				n := newFakeNet(t, except(tt.script, dead...))
				config, health := watched(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
				f := n.forwarder(config)
				asked := 0
				var wg sync.WaitGroup
				ask := func(name string) {
					asked++
					wg.Go(func() { _, _ = f.Exchange(t.Context(), query(name)) })
				}
				start := time.Now()
				for i := 0; time.Since(start) < span; i++ {
					ask(dead[i%len(dead)])
					if tt.good > 0 && time.Duration(i)*tt.every%tt.good == 0 {
						ask("good.example.")
					}
					time.Sleep(tt.every)
				}
				wg.Wait()
				sent := len(n.queries())
				t.Logf("%d sent for %d questions", sent, asked)
				if got := health(); len(got) != 0 {
					t.Errorf("a server that is healthy is told to be otherwise: %v", got)
				}
				if limit := asked*11/10 + allowance + reserve; sent > limit {
					t.Errorf("%d sent for %d questions", sent, asked)
				}
			})
		})
	}
}

// slowAtFirst returns a script of a server that takes so long for its first ten
// answers.
func slowAtFirst(after time.Duration) func(*fakeQuery) {
	n := 0
	return func(q *fakeQuery) {
		if n++; n <= 10 {
			q.reply(after, q.good())
			return
		}
		q.reply(ms, q.good())
	}
}

// denying is a public server: it knows nothing of internal names.
func denying(q *fakeQuery) { q.reply(ms, q.rcode(dns.RcodeNameError)) }

// What a public server denies of an internal name is never believed while the
// internal server before it is alive.
func TestInternalNames(t *testing.T) {
	const internal = "db.corp.example."
	only := func(script func(*fakeQuery)) func(*fakeQuery) { // beside names that are dead
		return except(script, deadNames...)
	}
	every := func(nth int, odd, script func(*fakeQuery)) func(*fakeQuery) {
		n := 0
		return func(q *fakeQuery) {
			if n++; n%nth == 0 {
				odd(q)
				return
			}
			script(q)
		}
	}
	failing := every(2, answering(dns.RcodeServerFailure), healthy(ms))
	broken := func(q *fakeQuery) { // the zone's data is not there for the moment
		if q.Question[0].Name == internal {
			failing(q)
			return
		}
		healthy(ms)(q)
	}
	for name, tt := range map[string]struct {
		internal func(*fakeQuery)
		answered int // of a hundred, at least
		owed     int // questions of confirmations that find it dead: see confirmAnyway
	}{
		"two dead names":              {internal: only(healthy(ms)), answered: 100},
		"two dead names, slow":        {internal: only(healthy(300 * ms)), answered: 100},
		"slower than the retry":       {internal: only(healthy(900 * ms)), answered: 100},
		"slow at first":               {internal: slowAtFirst(900 * ms), answered: 100},
		"slower than a confirmation":  {internal: only(healthy(1200 * ms)), answered: 0, owed: 7 * maxConfirmations},
		"one packet in three dropped": {internal: only(every(3, blackHole, healthy(ms))), answered: 50},
		"refused now and then":        {internal: only(every(10, refusing, healthy(ms))), answered: 95},
		"errors now and then":         {internal: only(broken), answered: 25},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, tt.internal, denying)
				config, health := watched(Config{Budget: usual})
				f := n.forwarder(config)
				answered, denied := 0, 0
				var wg sync.WaitGroup
				for i := range 4 { // at once, as a node that starts
					wg.Go(func() {
						ans, err := f.Exchange(t.Context(), query(fmt.Sprintf("db%d.corp.example.", i)))
						if err == nil && ans.Response.Rcode == dns.RcodeNameError {
							t.Error("denied at the start")
						}
					})
				}
				wg.Wait()
				for range 100 {
					for _, dead := range deadNames {
						wg.Go(func() { _, _ = f.Exchange(t.Context(), query(dead)) })
						time.Sleep(2 * time.Second)
					}
					ans, err := f.Exchange(t.Context(), query(internal))
					switch {
					case err != nil:
					case ans.Response.Rcode == dns.RcodeNameError:
						denied++
					case ans.Response.Rcode == dns.RcodeSuccess:
						answered++
					}
					time.Sleep(2 * time.Second)
				}
				wg.Wait()
				first, second := n.count(addr(1), "udp"), n.count(addr(2), "udp")
				t.Logf("%d answered, %d denied, %d and %d sent, health %v", answered, denied, first, second, health())
				if asked := 304; first > asked*11/10+allowance+reserve+tt.owed || second > asked*11/10 {
					t.Errorf("%d and %d sent for %d questions", first, second, asked)
				}
				if denied > 0 {
					t.Errorf("%d of 100 internal names denied", denied)
				}
				if answered < tt.answered {
					t.Errorf("%d of 100 answered, want %d", answered, tt.answered)
				}
			})
		})
	}
}

// A denial is still to be had when the first server is dead: once that is
// confirmed, which is in time for the very first question.
func TestDenialByTheSecondServer(t *testing.T) {
	for name, tt := range map[string]struct {
		first func(*fakeQuery)
		after time.Duration // of the first answer, at most
	}{
		"silent":   {blackHole, 1450 * ms},
		"refusing": {refusing, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, tt.first, denying)
				f := n.forwarder(Config{Budget: usual})
				start := time.Now()
				ans, err := f.Exchange(t.Context(), query("nothing.example."))
				if err != nil || ans.Response.Rcode != dns.RcodeNameError {
					t.Fatalf("answer %v, error %v, want the second server's denial", ans.Response.Rcode, err)
				}
				if after := time.Since(start); after > tt.after+ms {
					t.Errorf("answered after %v, want %v", after, tt.after)
				}
			})
		})
	}
}

// Death is noticed in bounded time, whatever is asked, and delays nothing that
// another server has data for.
func TestDeathIsNoticed(t *testing.T) {
	for name, tt := range map[string]struct {
		names  int
		every  time.Duration
		within time.Duration
		script func(*fakeQuery)
	}{
		"busy":                  {1000, 10 * ms, 1400 * ms, blackHole},
		"one question a second": {1000, time.Second, 4 * time.Second, blackHole},
		"one name only":         {1, 2 * time.Second, 8 * time.Second, blackHole},
		"two names only":        {2, 2 * time.Second, 8 * time.Second, blackHole},
		"refusing":              {1000, time.Second, 3 * time.Second, refusing},
		"refusing, one name":    {1, time.Second, 4 * time.Second, refusing},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, healthy(ms), healthy(ms))
				config, health := watched(Config{Budget: usual})
				f := n.forwarder(config)
				load(t, f, 100, 10*ms)
				n.become(addr(1), tt.script)
				start := time.Now()
				var noticed time.Duration
				var wg sync.WaitGroup
				for i := 0; noticed == 0; i++ {
					wg.Go(func() {
						if _, err := f.Exchange(t.Context(), query(fmt.Sprintf("a%d.example.", i%tt.names))); err != nil {
							t.Errorf("question %d: %v", i, err)
						}
					})
					time.Sleep(tt.every)
					if len(health()) > 0 || time.Since(start) > 2*tt.within {
						noticed = time.Since(start)
					}
				}
				wg.Wait()
				t.Logf("noticed after %v", noticed)
				if noticed > tt.within {
					t.Errorf("noticed after %v, want %v", noticed, tt.within)
				}
			})
		})
	}
}

// A death that falls into a time in which dead names have used up the budget is
// noticed all the same.
func TestDeathAmongDeadNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, except(healthy(ms), deadNames...), healthy(ms))
		n.become(addr(2), except(healthy(ms), deadNames...))
		config, health := watched(Config{Budget: usual})
		f := n.forwarder(config)
		ask := func(span time.Duration) {
			var wg sync.WaitGroup
			for i, start := 0, time.Now(); time.Since(start) < span && len(health()) == 0; i++ {
				wg.Go(func() { _, _ = f.Exchange(t.Context(), query(deadNames[i%2])) })
				time.Sleep(time.Second)
			}
			wg.Wait()
		}
		ask(10 * time.Minute)
		if got := health(); len(got) > 0 {
			t.Fatalf("down without need: %v", got)
		}
		n.become(addr(1), blackHole)
		start := time.Now()
		ask(10 * time.Minute)
		if took := time.Since(start); len(health()) == 0 || took > confirmAnyway+10*time.Second {
			t.Errorf("noticed after %v: %v", took, health())
		}
	})
}

// A resolver that is cut off from the world answers what it has cached, and so
// each confirmation. It stays up, for the names that only it knows; all else
// goes to the next server at the time of a hedge, which asks neither more than
// once.
func TestAnswersNothingElse(t *testing.T) {
	for name, cutOff := range map[string]func(*fakeQuery){
		"silent": blackHole, "servfail": answering(dns.RcodeServerFailure),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, healthy(ms), healthy(ms))
				config, health := watched(Config{Budget: usual})
				f := n.forwarder(config)
				load(t, f, 100, 10*ms)
				n.become(addr(1), func(q *fakeQuery) {
					if q.Question[0].Name == "." || q.Question[0].Name == "n99.example." {
						healthy(ms)(q)
						return
					}
					cutOff(q)
				})
				ask := func(questions int) (answered int, slowest time.Duration) {
					var mu sync.Mutex
					var wg sync.WaitGroup
					for i := range questions {
						wg.Go(func() {
							start := time.Now()
							_, err := f.Exchange(t.Context(), query(fmt.Sprintf("b%d.example.", i)))
							mu.Lock()
							defer mu.Unlock()
							if err == nil {
								answered++
								slowest = max(slowest, time.Since(start))
							}
						})
						time.Sleep(50 * ms)
					}
					wg.Wait()
					return answered, slowest
				}
				ask(100)
				first, second := n.count(addr(1), "udp"), n.count(addr(2), "udp")
				const questions = 1000
				answered, slowest := ask(questions)
				first, second = n.count(addr(1), "udp")-first, n.count(addr(2), "udp")-second
				t.Logf("%d answered, slowest %v, %d and %d sent, health %v", answered, slowest, first, second, health())
				if answered < questions || slowest > 251*ms {
					t.Errorf("%d answered, slowest %v", answered, slowest)
				}
				if first > questions*11/10 || second > questions*11/10 {
					t.Errorf("%d and %d sent for %d questions", first, second, questions)
				}
				if len(health()) > 0 {
					t.Errorf("not up: %v", health())
				}
			})
		})
	}
}

// However often one question is sent, and refused, it is one strike.
func TestOneQuestionOneStrike(t *testing.T) {
	for name, p := range map[string]Protocol{"udp": UDPOnly, "tcp": TCPOnly, "auto": Auto} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, refusing)
				config, health := watched(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: p}}})
				f := n.forwarder(config)
				for i := range 2 {
					_, err := f.Exchange(t.Context(), query(fmt.Sprintf("n%d.example.", i)))
					var e *Error
					if !errors.As(err, &e) || e.Reason != Network {
						t.Errorf("error %v, want a refusal", err)
					}
				}
				time.Sleep(2 * time.Second)
				if sent := len(n.queries()); sent != 6 {
					t.Errorf("%d sent for 2 questions, want 3 each and no confirmation", sent)
				}
				n.become(addr(1), healthy(ms))
				if _, err := f.Exchange(t.Context(), query("n2.example.")); err != nil || len(health()) > 0 {
					t.Errorf("error %v, health %v", err, health())
				}
			})
		})
	}
}

// What the kernel does not send is one lost datagram: nobody but its question
// notices.
func TestUnsent(t *testing.T) {
	for _, errno := range []syscall.Errno{
		syscall.EPERM, syscall.ENOBUFS, syscall.EAGAIN, syscall.EHOSTUNREACH, syscall.ENETUNREACH,
		syscall.EINVAL, syscall.ENETDOWN, syscall.EACCES, syscall.ENOMEM,
	} {
		for _, outstanding := range []int{20, 200} {
			t.Run(fmt.Sprintf("%v, %d outstanding", errno, outstanding), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					dice := rand.New(rand.NewPCG(9, 10))
					var mu sync.Mutex
					refused := 0
					n := newFakeNet(t, healthy(20*ms))
					n.writing = func(c *fakeConn) error {
						mu.Lock()
						defer mu.Unlock()
						if dice.IntN(100) > 0 {
							return nil
						}
						refused++
						return &net.OpError{Op: "write", Err: errno}
					}
					config, health := watched(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
					f := n.forwarder(config)
					const questions = 5000
					answered, slowest := load(t, f, questions, 20*ms/time.Duration(outstanding))
					st := f.Stats().Paths[UDP]
					t.Logf("%d of %d answered, slowest %v, %d refused, %d sockets, %d sent", answered, questions, slowest, refused, st.Opened, st.Queries)
					if lost := questions - answered; lost > 3 { // one in 10,000 is refused twice
						t.Errorf("%d of %d not answered", lost, questions)
					}
					if st.Queries > questions*11/10 || st.Resends > 0 {
						t.Errorf("%d sent for %d questions, %d of them again at once", st.Queries, questions, st.Resends)
					}
					if refused < questions/200 || st.Failures[Local] != uint64(refused) {
						t.Errorf("%d refused, %d counted", refused, st.Failures[Local])
					}
					if st.Failures[Network] > 0 || len(health()) > 0 {
						t.Errorf("%d network failures, health %v", st.Failures[Network], health())
					}
				})
			})
		}
	}
}

// That no socket is to be had is not the server's fault: questions go over those
// that there are, and fail as what they are where there is none.
func TestNoSockets(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, syscall.EAGAIN} {
		for name, p := range map[string]Protocol{"udp": UDPOnly, "tcp": TCPOnly, "auto": Auto} {
			t.Run(errno.Error()+" "+name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var none bool
					n := newFakeNet(t, healthy(ms), denying)
					n.dialing = func(string, netip.AddrPort) error {
						if none {
							return &net.OpError{Op: "dial", Err: errno}
						}
						return nil
					}
					config, health := watched(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: p}}})
					f := n.forwarder(config)
					load(t, f, 100, 10*ms)
					none = true
					answered, slowest := load(t, f, 2000, 20*ms) // much longer than a socket lives
					if answered != 2000 || slowest != ms {
						t.Errorf("%d of 2000 answered over the sockets there are, slowest %v", answered, slowest)
					}
					time.Sleep(time.Minute) // until there are none
					for range 5 {
						start := time.Now()
						_, err := f.Exchange(t.Context(), query("www.example."))
						var e *Error
						if !errors.As(err, &e) || e.Reason != Local || !errors.Is(err, errno) || time.Since(start) > 0 {
							t.Errorf("error %v after %v, want one that tells the cause, at once", err, time.Since(start))
						}
					}
					st := f.Stats()
					if st.Paths[UDP].Failures[Local]+st.Paths[TCP].Failures[Local] == 0 {
						t.Error("not counted")
					}
					none = false
					if answered, slowest := load(t, f, 100, 10*ms); answered != 100 || slowest != ms {
						t.Errorf("%d of 100 answered afterwards, slowest %v", answered, slowest)
					}
					if len(health()) > 0 || n.count(addr(2), "udp")+n.count(addr(2), "tcp") > 0 {
						t.Errorf("health %v, %d questions to the second server", health(), n.count(addr(2), "udp"))
					}
				})
			})
		}
	}
}
