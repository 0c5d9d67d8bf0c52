package main

import (
	"net"
	"net/netip"
	"testing"
	"time"
)

// serve answers on a loopback socket with whatever reply makes of the i-th query
// that it receives.
func serve(t *testing.T, reply func(i int, query []byte) [][]byte) netip.AddrPort {
	t.Helper()
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 1500)
		for i := 0; ; i++ {
			n, from, err := conn.ReadFromUDPAddrPort(buf)
			if err != nil {
				return // closed
			}
			for _, msg := range reply(i, buf[:n]) {
				if _, err := conn.WriteToUDPAddrPort(msg, from); err != nil {
					t.Error(err)
				}
			}
		}
	}()
	t.Cleanup(func() {
		_ = conn.Close()
		<-done
	})
	return conn.LocalAddr().(*net.UDPAddr).AddrPort()
}

// good is the answer without records to a query.
func good(query []byte) []byte {
	msg := append([]byte(nil), query...)
	msg[2] |= 0x80
	return msg
}

// counts is what a test compares of a result.
type counts struct{ sent, answered, lost, mismatched, unexpected uint64 }

func countsOf(r *result) counts {
	return counts{r.Sent, r.Answered, r.Lost, r.Mismatched, r.Unexpected}
}

func TestGenerator(t *testing.T) {
	// change turns query i's good answer into something else.
	change := func(f func(msg []byte)) func(int, []byte) [][]byte {
		return func(i int, query []byte) [][]byte {
			msg := good(query)
			if i%10 == 0 {
				f(msg)
			}
			return [][]byte{msg}
		}
	}
	for _, tt := range []struct {
		name  string
		ports int
		reply func(i int, query []byte) [][]byte
		want  counts
	}{
		{
			"all answered", 3,
			func(_ int, query []byte) [][]byte { return [][]byte{good(query)} },
			counts{sent: 200, answered: 200},
		},
		{
			"a tenth dropped", 3,
			func(i int, query []byte) [][]byte {
				if i%10 == 0 {
					return nil
				}
				return [][]byte{good(query)}
			},
			counts{sent: 200, answered: 180, lost: 20},
		},
		{
			// On one port, so that every second answer comes before the last first one.
			"a tenth doubled", 1,
			func(i int, query []byte) [][]byte {
				if i%10 == 0 {
					return [][]byte{good(query), good(query)}
				}
				return [][]byte{good(query)}
			},
			counts{sent: 200, answered: 200, unexpected: 20},
		},
		{
			"another name under the right id", 3,
			change(func(msg []byte) { msg[headerLen+1] ^= 1 }),
			counts{sent: 200, answered: 180, lost: 20, mismatched: 20},
		},
		{
			"another case under the right id", 3,
			change(func(msg []byte) { msg[headerLen+1] ^= 0x20 }),
			counts{sent: 200, answered: 180, lost: 20, mismatched: 20},
		},
		{
			"a query instead of an answer", 3,
			change(func(msg []byte) { msg[2] &^= 0x80 }),
			counts{sent: 200, answered: 180, lost: 20, mismatched: 20},
		},
		{
			"no question", 3,
			change(func(msg []byte) { msg[5] = 0 }),
			counts{sent: 200, answered: 180, lost: 20, mismatched: 20},
		},
		{
			"wrong id", 3,
			change(func(msg []byte) { msg[0] ^= 0x80 }),
			counts{sent: 200, answered: 180, lost: 20, unexpected: 20},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, loop := range []struct {
				name string
				rate float64
			}{{"closed", 0}, {"open", 20_000}} {
				t.Run(loop.name, func(t *testing.T) {
					ns, err := newPattern("host-####.example", "A", 0, 0)
					if err != nil {
						t.Fatal(err)
					}
					g, err := newGenerator(options{
						server: serve(t, tt.reply), sourcePorts: tt.ports, window: 20,
						rate: loop.rate, timeout: 400 * time.Millisecond,
					}, ns)
					if err != nil {
						t.Fatal(err)
					}
					defer g.close()
					r := g.run(time.Minute, 200, nil)
					if got := countsOf(r); got != tt.want {
						t.Errorf("got %+v, want %+v", got, tt.want)
					}
				})
			}
		})
	}
}

// A server that stands still for a while must show in the open loop's latencies
// for every query that was due meanwhile, asked or not.
func TestOpenLoopCountsStalls(t *testing.T) {
	const stall = 100 * time.Millisecond
	addr := serve(t, func(i int, query []byte) [][]byte {
		if i == 100 {
			time.Sleep(stall) // the fault under test, not a wait
		}
		return [][]byte{good(query)}
	})
	ns, err := newPattern("host-####.example", "A", 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	g, err := newGenerator(options{server: addr, sourcePorts: 2, rate: 2000, timeout: 5 * time.Second}, ns)
	if err != nil {
		t.Fatal(err)
	}
	defer g.close()
	r := g.run(time.Minute, 1000, nil)
	if r.Answered != 1000 {
		t.Fatalf("got %+v, want all of 1,000 answered", countsOf(r))
	}
	// 200 of 1,000 queries were due during the stall, evenly: their latencies fall
	// from 100 ms to 0.
	if got := r.latencies.quantile(0.9); got < stall/4 {
		t.Errorf("90 %% of the latencies are below %v: the stall of %v was hidden", got, stall)
	}
	if r.latencies.max < stall {
		t.Errorf("greatest latency %v, want at least the stall of %v", r.latencies.max, stall)
	}
}

func TestGeneratorRefused(t *testing.T) {
	// A closed port: the kernel reports ICMP errors, and every query is lost in time.
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	addr := conn.LocalAddr().(*net.UDPAddr).AddrPort()
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	ns, err := newPattern("host-####.example", "A", 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	g, err := newGenerator(options{server: addr, sourcePorts: 1, window: 5, timeout: 50 * time.Millisecond}, ns)
	if err != nil {
		t.Fatal(err)
	}
	defer g.close()
	r := g.run(time.Minute, 10, nil)
	if want := (counts{sent: 10, lost: 10}); countsOf(r) != want {
		t.Errorf("got %+v, want %+v", countsOf(r), want)
	}
	if r.Refused == 0 {
		t.Error("no send was refused, though nobody listens")
	}
}

func TestGeneratorAllocatesNothing(t *testing.T) {
	addr := serve(t, func(_ int, query []byte) [][]byte { return [][]byte{query} })
	ns, err := newPattern("host-####.example", "A", 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	g, err := newGenerator(options{server: addr, sourcePorts: 1, window: 1, timeout: time.Second}, ns)
	if err != nil {
		t.Fatal(err)
	}
	defer g.close()
	p, r := g.ports[0], &result{}
	answer := make([]byte, 512)
	allocs := testing.AllocsPerRun(1000, func() {
		p.fill(ns, nil, 0)
		n := copy(answer, p.packets[int((p.next-1)&p.mask)*p.stride:][:p.stride])
		answer[2] |= 0x80
		if _, v := p.match(answer[:n]); v != answered {
			t.Fatalf("verdict %d", v)
		}
		r.answer(answer[:n], time.Microsecond)
	})
	if allocs != 0 {
		t.Errorf("a query costs %v allocations", allocs)
	}
}
