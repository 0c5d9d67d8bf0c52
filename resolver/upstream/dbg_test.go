package upstream
import ("testing";"os";"time";"net/netip";"fmt";"net";"context";"sync";"golang.org/x/sys/unix";"github.com/miekg/dns")
func TestDbgServe(t *testing.T){
	if os.Getenv("DBG")=="" {return}
	a := answerer(t)
	os.WriteFile("/tmp/dbg.addr", []byte(a.String()), 0o600)
	time.Sleep(40*time.Second)
}
func BenchmarkDbg(b *testing.B){
	text,_ := os.ReadFile("/tmp/dbg.addr")
	f := newForwarder(b, Config{Budget: usual}, netip.MustParseAddrPort(string(text)))
	for _, p := range []int{1,32,100} {
	b.Run(fmt.Sprint(p), func(b *testing.B){
		b.ReportAllocs()
		var r0, r1 unix.Rusage
		unix.Getrusage(unix.RUSAGE_SELF, &r0)
		var wg sync.WaitGroup
		for range p { wg.Go(func(){ q := query("www.example.com."); for range b.N/p { if _, err := f.Exchange(context.Background(), q); err != nil {b.Error(err)} } }) }
		wg.Wait()
		unix.Getrusage(unix.RUSAGE_SELF, &r1)
		b.ReportMetric(float64(r1.Utime.Nano()-r0.Utime.Nano())/float64(b.N), "user-ns/op")
		b.ReportMetric(float64(r1.Stime.Nano()-r0.Stime.Nano())/float64(b.N), "sys-ns/op")
	})
	}
	b.Logf("%+v", f.Stats().Paths[0])
}
func TestDbg6(t *testing.T){
	pc, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("[::1]:0")))
	if err != nil { t.Fatal(err) }
	s := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(replyA)}
	go s.ActivateAndServe()
	defer s.Shutdown()
	f := newForwarder(t, Config{}, pc.LocalAddr().(*net.UDPAddr).AddrPort())
	ans, err := f.Exchange(t.Context(), query("x.example."))
	t.Log(ans.Server, err)
}
