package resolver

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// FuzzFrames sends any octets over a TCP connection, in two pieces. Every whole
// frame before the first that is no query's has as many answers as it deserves,
// under its id; then the connection ends, however it was cut, and nothing of it is
// left.
func FuzzFrames(f *testing.F) {
	one := frame(f, query("example.com.", dns.TypeA))
	other := frame(f, query("other.example.com.", dns.TypeANY))
	f.Add(one, 0)
	f.Add(one, 1)
	f.Add(one[:len(one)-1], 7)
	f.Add(append(bytes.Clone(one), other...), len(one)+1)
	f.Add(bytes.Repeat(one, 200), 1000) // more than are worked on at a time
	f.Add(append(bytes.Clone(one), 0, 0), 3)
	f.Add(append(bytes.Clone(one), 0xff, 0xff, 1, 2, 3), 2)
	f.Add(append([]byte{0, 12}, make([]byte, 12)...), 5)
	f.Add([]byte{0}, 0)
	f.Fuzz(func(t *testing.T, octets []byte, cut int) {
		if len(octets) > 1<<15 {
			return
		}
		var want []uint16
		for rest := octets; len(rest) >= 2; {
			n := int(binary.BigEndian.Uint16(rest))
			if n < dnswire.HeaderLen || n > maxQueryLen || len(rest) < 2+n {
				break
			}
			var q dnswire.Query
			if msg := rest[2 : 2+n]; dnswire.ParseQuery(msg, &q) != dnswire.Drop {
				want = append(want, binary.BigEndian.Uint16(msg))
			}
			rest = rest[2+n:]
		}
		synctest.Test(t, func(t *testing.T) {
			r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
			conn, _ := pipeConn(t, r)
			sent := make(chan struct{})
			go func() {
				defer close(sent)
				at := max(0, min(cut, len(octets)))
				_, _ = conn.Write(octets[:at]) // it may end the connection first
				time.Sleep(time.Millisecond)   // of the bubble's time
				_, _ = conn.Write(octets[at:])
			}()
			var got []uint16
			for {
				m, err := readMsg(conn)
				if err != nil {
					if m != nil {
						t.Errorf("no message: %v", err)
					}
					break
				}
				if !m.Response {
					t.Errorf("no answer: %v", m)
				}
				got = append(got, m.Id)
			}
			<-sent
			slices.Sort(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Errorf("%x, cut at %d: answers to %v, want %v", octets, cut, got, want)
			}
			end(t, r)
			synctest.Wait()
			if s := r.Stats(); s.Conns != 0 || s.InFlight != 0 || s.Waiters != 0 || r.conns.output.Load() != 0 {
				t.Errorf("%x: left %d connections, %d questions, %d waiters, %d octets of output", octets, s.Conns, s.InFlight, s.Waiters, r.conns.output.Load())
			}
		})
	})
}
