package lab_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

func TestDNSServerCounts(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pod := labtest.AddDNS(t, l, "dns-a")[0]
	server := endpoint(pod.Pod, true)
	client := labtest.AddPod(t, l, "client")
	for _, network := range []string{"udp", "udp", "tcp"} {
		mustAsk(t, client.Namespace, network, server, "ECHO.default.svc.cluster.local")
	}
	if udp, tcp := pod.Server.Total(); udp != 2 || tcp != 1 {
		t.Errorf("%d over UDP, %d over TCP", udp, tcp)
	}
	counts := pod.Server.Counts()
	if want := (lab.Question{Name: echo + ".", Type: dns.TypeA}); len(counts) != 1 || counts[want] != 3 {
		t.Errorf("counts %v", counts)
	}
}

func TestDNSServerEDNSAndSize(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pod := labtest.AddDNS(t, l, "dns-a")[0]
	server := endpoint(pod.Pod, true)
	client := labtest.AddPod(t, l, "client")
	const long = "text.example.com."
	askLong := func(network string, size uint16) *dns.Msg {
		t.Helper()
		query := new(dns.Msg).SetQuestion(long, dns.TypeTXT)
		if size > 0 {
			query.SetEdns0(size, false)
		}
		packed, err := query.Pack()
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), enough)
		defer cancel()
		reply, err := lab.Exchange(ctx, client.Namespace, network, server, packed)
		if err != nil {
			t.Fatal(err)
		}
		limit := max(int(size), dns.MinMsgSize)
		if network == "udp" && len(reply) > limit {
			t.Errorf("%d octets over UDP, limit %d", len(reply), limit)
		}
		m := new(dns.Msg)
		if err := m.Unpack(reply); err != nil {
			t.Fatal(err)
		}
		if (m.IsEdns0() != nil) != (size > 0) {
			t.Errorf("EDNS in the answer: %v, in the query: %v", m.IsEdns0() != nil, size > 0)
		}
		return m
	}
	for _, size := range []uint16{0, 512, 1232} {
		if m := askLong("udp", size); !m.Truncated {
			t.Errorf("over UDP with size %d: not truncated", size)
		}
	}
	if m := askLong("tcp", 1232); m.Truncated || len(m.Answer) != 1 {
		t.Errorf("over TCP: truncated %v, %d answers", m.Truncated, len(m.Answer))
	}
}

func TestDNSServerFaults(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pod := labtest.AddDNS(t, l, "dns-a")[0]
	server := endpoint(pod.Pod, true)
	client := labtest.AddPod(t, l, "client")

	answered := func(t *testing.T, m *dns.Msg) {
		t.Helper()
		if m.Rcode != dns.RcodeSuccess || len(m.Answer) != 1 || m.Truncated {
			t.Errorf("answer:\n%v", m)
		}
	}
	cases := []struct {
		name     string
		faults   lab.Faults
		udp, tcp func(t *testing.T, m *dns.Msg) // nil: no answer in time
	}{
		{"none", lab.Faults{}, answered, answered},
		{"silent", lab.Faults{Silent: true}, nil, nil},
		{"slow", lab.Faults{Delay: time.Hour}, nil, nil},
		{"truncated", lab.Faults{Truncate: true}, func(t *testing.T, m *dns.Msg) {
			if !m.Truncated || len(m.Answer) != 0 {
				t.Errorf("answer:\n%v", m)
			}
		}, answered},
		{"servfail", lab.Faults{Rcode: dns.RcodeServerFailure}, servfail, servfail},
		{"udp blocked", lab.Faults{BlockUDP: true}, nil, answered},
		{"tcp blocked", lab.Faults{BlockTCP: true}, answered, nil},
		{"both blocked", lab.Faults{BlockUDP: true, BlockTCP: true}, nil, nil},
		{"none again", lab.Faults{}, answered, answered},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if err := pod.Server.SetFaults(c.faults); err != nil {
				t.Fatal(err)
			}
			for network, check := range map[string]func(*testing.T, *dns.Msg){"udp": c.udp, "tcp": c.tcp} {
				timeout := enough
				if check == nil {
					timeout = brief
				}
				m, err := ask(t, client.Namespace, network, server, echo, timeout)
				switch {
				case check == nil && !errors.Is(err, lab.ErrTimeout):
					t.Errorf("over %s: %v, want ErrTimeout", network, err)
				case check != nil && err != nil:
					t.Errorf("over %s: %v", network, err)
				case check != nil:
					check(t, m)
				}
			}
		})
	}
}

func servfail(t *testing.T, m *dns.Msg) {
	t.Helper()
	if m.Rcode != dns.RcodeServerFailure || len(m.Answer) != 0 {
		t.Errorf("answer:\n%v", m)
	}
}

// Closing does not wait for delayed answers, nor for connections that are open.
func TestDNSServerClosesAtOnce(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pod := labtest.AddDNS(t, l, "dns-a")[0]
	server := endpoint(pod.Pod, true)
	client := labtest.AddPod(t, l, "client")
	idle, err := client.Dial(t.Context(), "tcp", server.String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = idle.Close() }()
	if err := pod.Server.SetFaults(lab.Faults{Delay: time.Hour}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), enough)
	defer cancel()
	waiting := make(chan error, 2)
	for _, network := range []string{"udp", "tcp"} {
		go func() {
			_, err := lab.Ask(ctx, client.Namespace, network, server, echo, dns.TypeA)
			waiting <- err
		}()
	}
	for udp, tcp := 0, 0; udp*tcp == 0; udp, tcp = pod.Server.Total() {
		time.Sleep(time.Millisecond) // the questions are on their way
	}
	start := time.Now()
	for range 2 {
		if err := pod.Server.Close(); err != nil {
			t.Fatal(err)
		}
	}
	// The server's patience with an idle connection is 2 s.
	if took := time.Since(start); took > time.Second {
		t.Errorf("closing took %v", took)
	}
	cancel()
	for range 2 {
		if err := <-waiting; err == nil {
			t.Error("a delayed query was answered by a server that has closed")
		}
	}
}
