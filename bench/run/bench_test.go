package main

import (
	"os/exec"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// The whole apparatus, on the one server that is always there: namespaces, wire,
// server, generator, report. Its figures mean nothing here.
func TestRoundOfEcho(t *testing.T) {
	labtest.Require(t)
	tools := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-o", tools+"/", "../load", "../echo")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the tools: %v\n%s", err, out)
	}
	n, err := newNetwork()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.close(); err != nil {
			t.Error(err)
		}
	}()
	b := &bench{network: n, tools: tools, duration: 200 * time.Millisecond}
	if err := b.startUpstream(t.Context()); err != nil {
		t.Fatal(err)
	}

	t.Run("echo", func(t *testing.T) {
		servers, err := choose(t.Context(), "echo", map[string]string{"echo": tools + "/echo"})
		if err != nil {
			t.Fatal(err)
		}
		got, err := b.round(t.Context(), servers[0])
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range []metric{hitQPS, hitCPU, p50At1k, p999At5k, startup, binarySize} {
			if got[m] <= 0 {
				t.Errorf("%s = %v", m, got[m])
			}
		}
		if got[lost] != 0 {
			t.Errorf("%v answers of the echo were lost", got[lost])
		}
	})

	t.Run("server that ends", func(t *testing.T) {
		s := installed{server: server{name: "false"}, path: "/bin/false"}
		if _, err := b.round(t.Context(), s); err == nil {
			t.Error("a server that ends at once is no error")
		}
	})
}

func TestChoose(t *testing.T) {
	for _, only := range []string{"nonesuch", "echo,nonesuch", "coredns"} {
		if got, err := choose(t.Context(), only, map[string]string{"coredns": "/nonexistent/coredns"}); err == nil {
			t.Errorf("choose(%q) = %v, want an error", only, got)
		}
	}
}
