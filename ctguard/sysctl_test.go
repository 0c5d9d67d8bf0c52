package ctguard

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseIPVS(t *testing.T) {
	for _, tt := range []struct {
		name, file string
		want       []string
		wantErr    bool
	}{
		{"empty", "", nil, false},
		{"header only", "IP Virtual Server version 1.2.1 (size=4096)\nProt LocalAddress:Port Scheduler Flags\n  -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n", nil, false},
		{"kube-proxy", `IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  0A60000A:0035 rr
  -> 0AF40003:0035      Masq    1      0          0
UDP  0A60000A:0035 rr
  -> 0AF40003:0035      Masq    1      0          2
UDP  [fd00:0010:0096:0000:0000:0000:0000:000a]:0035 rr
  -> [fd00:0010:0244:0000:0000:0000:0000:0003]:0035      Masq    1      0          0
FWM  00000001 wlc
`, []string{vip4, vip6}, false},
		{"no port", "UDP  0A60000A rr\n", nil, true},
		{"bad port", "UDP  0A60000A:xx rr\n", nil, true},
		{"bad address", "UDP  0A6000:0035 rr\n", nil, true},
		{"no hex", "UDP  zz60000A:0035 rr\n", nil, true},
		{"bad IPv6 address", "UDP  [fd00]:0035 rr\n", nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseIPVS([]byte(tt.file))
			if (err != nil) != tt.wantErr {
				t.Fatalf("error %v", err)
			}
			var want []netip.AddrPort
			for _, w := range tt.want {
				want = append(want, netip.MustParseAddrPort(w))
			}
			if diff := cmp.Diff(want, got, compareAddrs); diff != "" {
				t.Errorf("virtual servers (-want +got):\n%s", diff)
			}
		})
	}
}

func TestTimeoutsWithoutConntrack(t *testing.T) {
	missing := openProc("/proc/sys/net/netfilter/no-such-file")
	k := &Kernel{sysctls: sysctls{unreplied: missing, stream: missing, events: missing, ipvs: missing}}
	if _, err := k.Timeouts(); err == nil {
		t.Error("no error")
	}
	if vs, err := k.VirtualServers(); err != nil || vs != nil {
		t.Errorf("virtual servers %v, %v", vs, err)
	}
	if err := k.Close(); err != nil {
		t.Error(err)
	}
}
