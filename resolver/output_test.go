package resolver

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// textOf answers every question with about 60 KiB.
func textOf(t testing.TB) func(context.Context, *dns.Msg) error {
	return func(_ context.Context, m *dns.Msg) error {
		for range 290 {
			m.Answer = append(m.Answer, rr(t, `%s 60 IN TXT "%s"`, m.Question[0].Name, strings.Repeat("x", 200)))
		}
		return nil
	}
}

// TestTCPOutputBound: when the output of all connections is too much, those
// that have much of it end at once, and the others do not notice.
func TestTCPOutputBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error {
			if m.Question[0].Qtype == dns.TypeTXT {
				return textOf(t)(ctx, m)
			}
			return addressOf(t, 60)(ctx, m)
		}}
		r := newTestResolver(t, f)
		conn, _ := pipeConn(t, r)
		large, small := frame(t, query("example.com.", dns.TypeTXT)), frame(t, query("example.com.", dns.TypeA))
		for _, q := range [][]byte{large, small} {
			mustWrite(t, conn, q)
			mustRead(t, conn)
		}
		synctest.Wait()
		r.conns.output.Store(outputBudget)
		mustWrite(t, conn, small)
		mustRead(t, conn)
		start := time.Now()
		mustWrite(t, conn, large) // a hit: its own reader breaks the connection
		if m, err := readMsg(conn); !errors.Is(err, io.EOF) {
			t.Errorf("read %v, %v, want EOF", m, err)
		}
		if d := time.Since(start); d != 0 {
			t.Errorf("closed after %v", d)
		}
		synctest.Wait()
		if s := r.Stats(); s.Shed[ShedOutput] != 1 {
			t.Errorf("stats %+v", s)
		}
		if n := r.conns.output.Load(); n != outputBudget {
			t.Errorf("%d octets of output left accounted", n-outputBudget)
		}
		end(t, r)
	})
}

// TestTCPLargeAnswers: a client that asks for more than all connections may have
// gets it, as fast as it takes it, and little of it is held at a time: while it
// reads, and while it does not.
func TestTCPLargeAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestResolver(t, &fakeForwarder{answer: textOf(t)})
		conn, c := pipeConn(t, r)
		q := frame(t, query("example.com.", dns.TypeTXT))
		mustWrite(t, conn, q)
		n := len(mustRead(t, conn).Answer)
		const queries = 500 // 30 MiB
		go func() {
			for range queries {
				if _, err := conn.Write(q); err != nil {
					t.Error(err)
					return
				}
			}
		}()
		most := int64(0)
		for i := range queries {
			if i%100 == 0 {
				time.Sleep(writeTimeout / 2)
			}
			if m := mustRead(t, conn); len(m.Answer) != n {
				t.Fatalf("answer %d has %d records, want %d", i, len(m.Answer), n)
			}
			most = max(most, r.conns.output.Load())
		}
		if most > 3*dnswire.MaxMsgLen {
			t.Errorf("%d octets held for one connection", most)
		}
		synctest.Wait()
		c.mu.Lock()
		if n := cap(c.out); n > keepOutput || c.unsent != 0 {
			t.Errorf("%d octets kept for output, %d accounted", n, c.unsent)
		}
		c.mu.Unlock()
		_ = conn.Close()
		end(t, r)
	})
}

// TestTCPSlowClient: a client that takes its answers slowly keeps its
// connection; one that stops loses it.
func TestTCPSlowClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestResolver(t, &fakeForwarder{answer: textOf(t)})
		conn, _ := pipeConn(t, r)
		mustWrite(t, conn, frame(t, query("example.com.", dns.TypeTXT)))
		buf := make([]byte, writeChunk/4)
		for range 4 * 3 { // 48 of 61 KiB
			time.Sleep(writeTimeout / 5)
			if _, err := io.ReadFull(conn, buf); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(2 * writeTimeout)
		if _, err := io.ReadFull(conn, buf); err == nil {
			t.Error("more comes after a pause")
		}
		end(t, r)
	})
}
