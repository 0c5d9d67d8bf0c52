package upstream

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func addrPorts(texts ...string) []netip.AddrPort {
	var all []netip.AddrPort
	for _, text := range texts {
		all = append(all, netip.MustParseAddrPort(text))
	}
	return all
}

func compareAddrPorts() cmp.Option { return cmpopts.EquateComparable(netip.AddrPort{}) }

func TestParseResolvConf(t *testing.T) {
	for name, tt := range map[string]struct {
		text string
		want []netip.AddrPort
	}{
		"empty":       {"", nil},
		"one":         {"nameserver 10.0.0.1\n", addrPorts("10.0.0.1:53")},
		"no line end": {"nameserver 10.0.0.1", addrPorts("10.0.0.1:53")},
		"carriage returns": {
			"nameserver 10.0.0.1\r\nnameserver 10.0.0.2\r\n", addrPorts("10.0.0.1:53", "10.0.0.2:53"),
		},
		"in order, with other options and comments": {
			"# nameserver 10.0.0.9\n; nameserver 10.0.0.8\n#nameserver 10.0.0.7\nsearch example.com\noptions ndots:5\n" +
				"nameserver 10.0.0.2\n\tnameserver\t10.0.0.1 # this one, too\nsortlist 10.0.0.6\n",
			addrPorts("10.0.0.2:53", "10.0.0.1:53"),
		},
		"IPv6, with a zone":       {"nameserver fd00::a\nnameserver fe80::1%eth0\n", addrPorts("[fd00::a]:53", "[fe80::1%eth0]:53")},
		"IPv4 in IPv6":            {"nameserver ::ffff:10.0.0.1\n", addrPorts("10.0.0.1:53")},
		"twice":                   {"nameserver 10.0.0.1\nnameserver 10.0.0.1\n", addrPorts("10.0.0.1:53")},
		"unspecified is loopback": {"nameserver 0.0.0.0\nnameserver ::\n", addrPorts("127.0.0.1:53", "[::1]:53")},
		"not addresses":           {"nameserver\nnameserver dns.example\nnameserver 10.0.0\nnameserver 10.0.0.1:53\nnameservers 10.0.0.1\nnameserver 10.0.0.3\n", addrPorts("10.0.0.3:53")},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, parseResolvConf([]byte(tt.text)), compareAddrPorts()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func FuzzParseResolvConf(f *testing.F) {
	f.Add("nameserver 10.0.0.1\n# x\nnameserver fe80::1%eth0")
	f.Fuzz(func(t *testing.T, text string) {
		for _, s := range parseResolvConf([]byte(text)) {
			if !s.IsValid() || s.Port() != 53 || s.Addr().IsUnspecified() || !strings.Contains(text, "nameserver") {
				t.Errorf("server %v from %q", s, text)
			}
		}
	})
}

func TestWatchedFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		file := filepath.Join(dir, "resolv.conf")
		write := func(text string) {
			t.Helper()
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		type told struct {
			Servers []netip.AddrPort
			Failed  bool
		}
		var (
			mu   sync.Mutex
			news []told
		)
		n := newFakeNet(t, healthy(ms), healthy(ms), healthy(ms))
		write("nameserver 192.0.2.1\n")
		f := n.forwarder(Config{
			Routes: []Route{{Zones: []string{"."}, Servers: []Server{{File: file}, {Addr: addr(3)}}}},
			Self:   func(a netip.AddrPort) bool { return a.Addr() == netip.MustParseAddr("192.0.2.99") },
			OnServers: func(of string, servers []netip.AddrPort, err error) {
				if of != file {
					t.Errorf("told of %q", of)
				}
				mu.Lock()
				defer mu.Unlock()
				news = append(news, told{servers, err != nil})
			},
		})
		asked := func() int {
			t.Helper()
			ans, err := f.Exchange(t.Context(), query("www.example."))
			if err != nil {
				t.Fatal(err)
			}
			return lastOctet(ans.Server)
		}
		for _, step := range []struct {
			name   string
			change func()
			server int
			told   []told
		}{
			{"at the start", func() {}, 1, nil},
			{"other server", func() { write("nameserver 192.0.2.2\n") }, 2, []told{{addrPorts("192.0.2.2:53"), false}}},
			{"rewritten unchanged", func() { write("nameserver 192.0.2.2\n") }, 2, nil},
			{"only a comment changed", func() { write("# hello\nnameserver 192.0.2.2\n") }, 2, nil},
			{"emptied: the old one stays", func() { write("") }, 2, []told{{nil, true}}},
			{"only ourselves: the old one stays", func() { write("nameserver 192.0.2.99\n") }, 2, []told{{nil, true}}},
			{"ourselves are skipped", func() { write("nameserver 192.0.2.99\nnameserver 192.0.2.1\n") }, 1, []told{{addrPorts("192.0.2.1:53"), false}}},
			{"gone: the old one stays", func() { _ = os.Remove(file) }, 1, []told{{nil, true}}},
			{"back as it was", func() { write("nameserver 192.0.2.1\n") }, 1, nil},
			{"a symlink", func() {
				other := filepath.Join(dir, "other")
				if err := errors.Join(os.WriteFile(other, []byte("nameserver 192.0.2.2\n"), 0o600), os.Remove(file), os.Symlink(other, file)); err != nil {
					t.Fatal(err)
				}
			}, 2, []told{{addrPorts("192.0.2.2:53"), false}}},
			{"swapped symlink", func() {
				third, link := filepath.Join(dir, "third"), filepath.Join(dir, "link")
				if err := errors.Join(os.WriteFile(third, []byte("nameserver 192.0.2.1\n"), 0o600), os.Symlink(third, link), os.Rename(link, file)); err != nil {
					t.Fatal(err)
				}
			}, 1, []told{{addrPorts("192.0.2.1:53"), false}}},
		} {
			step.change()
			time.Sleep(3 * pollInterval)
			if got := asked(); got != step.server {
				t.Errorf("%s: server %d asked, want %d", step.name, got, step.server)
			}
			mu.Lock()
			if diff := cmp.Diff(step.told, news, compareAddrPorts()); diff != "" {
				t.Errorf("%s: told %s", step.name, diff)
			}
			news = nil
			mu.Unlock()
		}
		time.Sleep(time.Minute)
		if len(f.departed) > 3 {
			t.Errorf("%d departed servers kept", len(f.departed))
		}
	})
}

// Sockets to a server that the file names no more are closed by Close, too, and
// what is in flight there is answered.
func TestDepartedServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "resolv.conf")
		if err := os.WriteFile(file, []byte("nameserver 192.0.2.1\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		n := newFakeNet(t, healthy(5*time.Second), healthy(ms))
		f := n.forwarder(Config{
			Timeouts: Timeouts{Hedge: 8 * time.Second, Retry: 8 * time.Second, Total: 10 * time.Second},
			Routes:   []Route{{Zones: []string{"."}, Protocol: TCPOnly, Servers: []Server{{File: file}}}},
		})
		done := make(chan error)
		go func() {
			_, err := f.Exchange(t.Context(), query("www.example."))
			done <- err
		}()
		synctest.Wait()
		if err := os.WriteFile(file, []byte("nameserver 192.0.2.2\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		if st := f.Stats(); len(st.Paths) != 2 || st.Paths[0].Server != addr(2) {
			t.Errorf("Stats tell of the old server: %v", st.Paths)
		}
		if err := <-done; err != nil {
			t.Errorf("question in flight: %v", err)
		}
		start := time.Now()
		f.Close()
		if took := time.Since(start); took != 0 {
			t.Errorf("Close took %v", took)
		}
	})
}

func TestNoNameservers(t *testing.T) {
	dir := t.TempDir()
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, []byte("search example\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	own := filepath.Join(dir, "own")
	if err := os.WriteFile(own, []byte("nameserver 169.254.20.10\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		file string
		want error
		text string
	}{
		"missing":       {filepath.Join(dir, "missing"), os.ErrNotExist, "missing"},
		"no nameserver": {empty, ErrNoServers, empty},
		"only self":     {own, ErrNoServers, "169.254.20.10:53"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := New(Config{
				Routes: []Route{{Zones: []string{"."}, Servers: []Server{{File: tt.file}}}},
				Self:   func(a netip.AddrPort) bool { return a.Addr() == netip.MustParseAddr("169.254.20.10") },
			})
			if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("error %v, want %v with %q", err, tt.want, tt.text)
			}
		})
	}
}
