package upstream

import (
	"encoding/binary"
	"testing"
	"testing/synctest"
	"time"
)

// FuzzStream has a server send any octets over TCP, in two pieces, in place of
// framed answers. The exchange ends in time all the same, believes nothing that is
// no answer to its question, and leaves no socket behind.
func FuzzStream(f *testing.F) {
	f.Add([]byte{0, 0}, 1)
	f.Add([]byte{0, 5, 1, 2, 3, 4, 5}, 3)
	f.Add([]byte{0xff, 0xff, 1}, 0)
	f.Add(append([]byte{0, 12}, make([]byte, 12)...), 6)
	f.Add([]byte{}, 0)
	f.Add([]byte{0}, 0)
	f.Fuzz(func(t *testing.T, octets []byte, cut int) {
		if len(octets) > 1<<15 {
			return
		}
		synctest.Test(t, func(t *testing.T) {
			var id uint16
			n := newFakeNet(t, func(q *fakeQuery) {
				if !q.tcp() {
					t.Error("asked over UDP")
				}
				id = q.Id
				b := append([]byte(nil), octets...)
				if len(b) >= 4 { // the right id, or nothing else is looked at
					binary.BigEndian.PutUint16(b[2:], q.Id)
				}
				at := max(0, min(cut, len(b)))
				if at > 0 {
					q.octets(ms, b[:at])
				}
				if at < len(b) {
					q.octets(2*ms, b[at:])
				}
			})
			f := n.forwarder(Config{Routes: []Route{{Zones: []string{"."}, Protocol: TCPOnly}}})
			start := time.Now()
			ans, err := f.Exchange(t.Context(), query("www.example."))
			if took := time.Since(start); took > 1600*ms {
				t.Errorf("%x: it took %v", octets, took)
			}
			if err == nil && (!isAnswer(ans.Msg) || binary.BigEndian.Uint16(ans.Msg) != id) {
				t.Errorf("%x: believed %x", octets, ans.Msg)
			}
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		})
	})
}
