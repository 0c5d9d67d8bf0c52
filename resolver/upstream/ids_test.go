package upstream

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestIDsOfLateAnswers: a socket that serves on, since no other is to be had, keeps no
// ids for answers that come no more. It has 65,536, and a question needs one.
func TestIDsOfLateAnswers(t *testing.T) {
	for _, tr := range []Transport{UDP, TCP} {
		synctest.Test(t, func(t *testing.T) {
			const perMillisecond, questions = 2, 10 * udpQuestions
			f := newFakeNet(t, blackHole).forwarder(Config{})
			s := f.servers[addr(1)]
			c := newConn(s, tr, f.now(), true)
			for i := range questions {
				s.mu.Lock()
				c.enter(c.newID(), entry{sent: f.now()}) // nobody waits any more
				held := len(c.entries)
				s.unlock()
				if held > 2*udpQuestions {
					t.Fatalf("%s: %d ids are held after %d questions, want %d at most", tr, held, i+1, 2*udpQuestions)
				}
				if i%perMillisecond == 0 {
					time.Sleep(time.Millisecond)
				}
			}
			c.close(errMovedOn)
		})
	}
}
