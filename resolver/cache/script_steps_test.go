package cache

import (
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// key returns the key of the question for a name in presentation format.
func (s *script) key(name string, qtype uint16, do, cd bool) []byte {
	wire, err := wireName(name)
	if err != nil {
		s.fatalf("%v", err)
	}
	return AppendKey(nil, []byte(wire), qtype, dnswire.ClassIN, do, cd)
}

func (s *script) qtype(word string) uint16 {
	qtype, ok := dns.StringToType[word]
	if !ok {
		s.fatalf("unknown type %s", word)
	}
	return qtype
}

func (s *script) answer(args []string) {
	p := &pendingAnswer{msg: new(dns.Msg), asked: args[0]}
	p.msg.SetQuestion(dns.Fqdn(args[0]), s.qtype(args[1]))
	p.msg.Response, p.msg.RecursionAvailable, p.msg.Compress = true, true, true
	for _, arg := range args[2:] {
		switch arg {
		case "aa":
			p.msg.Authoritative = true
		case "ad":
			p.msg.AuthenticatedData = true
		case "tc":
			p.msg.Truncated = true
		case "do":
			p.do = true
		case "cd":
			p.cd = true
		case "opt":
			p.opt = true
		case "opt-first":
			p.optFirst = true
		case "loose":
			p.msg.Compress = false
		default:
			if name, ok := strings.CutPrefix(arg, "asked="); ok {
				p.asked = name
				continue
			}
			rcode, ok := dns.StringToRcode[arg]
			if !ok {
				s.fatalf("unknown %s", arg)
			}
			p.msg.Rcode = rcode
		}
	}
	s.pending = p
}

// record reads an indented line: one record of the pending answer, or several.
func (s *script) record(words []string) {
	if s.pending == nil {
		s.fatalf("records without an answer")
	}
	n := 1
	if words[0] == "repeat" {
		n = s.int(words[1])
		words = words[2:]
	}
	section := map[string]*[]dns.RR{
		"answer": &s.pending.msg.Answer, "authority": &s.pending.msg.Ns, "additional": &s.pending.msg.Extra,
	}[words[0]]
	if section == nil {
		s.fatalf("unknown section %s", words[0])
	}
	for i := range n {
		rr, err := dns.NewRR(strings.ReplaceAll(strings.Join(words[1:], " "), "%d", strconv.Itoa(i)))
		if err != nil {
			s.fatalf("%v", err)
		}
		*section = append(*section, rr)
	}
}

// finishAnswer stores the pending answer.
func (s *script) finishAnswer() {
	s.t.Helper()
	p := s.pending
	if p == nil {
		return
	}
	s.pending = nil
	if p.opt || p.optFirst {
		opt := &dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT, Class: 4096}, Option: []dns.EDNS0{
			&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0123456789abcdef0123456789abcdef"},
		}}
		if p.optFirst {
			p.msg.Extra = append([]dns.RR{opt}, p.msg.Extra...)
		} else {
			p.msg.Extra = append(p.msg.Extra, opt)
		}
	}
	wire, err := p.msg.Pack()
	if err != nil {
		s.fatalf("%v", err)
	}
	var r dnswire.Response
	if err := dnswire.ParseResponse(wire, &r); err != nil {
		s.fatalf("%v", err)
	}
	qtype := p.msg.Question[0].Qtype
	e, cached := s.cache.Store(s.key(p.asked, qtype, p.do, p.cd), wire, &r, s.cache.Now())
	clear(s.facts)
	s.facts["cached"] = yes(cached)
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(p.asked), qtype)
	s.reply(e, q, ReplyOptions{})
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func (s *script) query(verb string, args []string) {
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(args[0]), s.qtype(args[1]))
	var o ReplyOptions
	edns, do, keepalive, tcp := 0, false, false, false
	for _, arg := range args[2:] {
		switch name, value, _ := strings.Cut(arg, "="); name {
		case "do":
			do = true
			edns = max(edns, dnswire.MinUDPSize)
		case "ad":
			q.AuthenticatedData = true
		case "cd":
			q.CheckingDisabled = true
		case "nord":
			q.RecursionDesired = false
		case "edns":
			edns = s.int(value)
		case "keepalive":
			keepalive = true
		case "limit":
			o.Limit = s.int(value)
		case "tcp":
			tcp = true
			o.Keepalive = 10 * time.Second
		case "trust":
			o.TrustAD = true
		default:
			s.fatalf("unknown %s", arg)
		}
	}
	if edns > 0 {
		q.SetEdns0(uint16(edns), do)
		if keepalive {
			q.IsEdns0().Option = append(q.IsEdns0().Option, &dns.EDNS0_TCP_KEEPALIVE{Code: dns.EDNS0TCPKEEPALIVE})
		}
	}
	if o.Limit == 0 && !tcp {
		o.Limit = min(max(dnswire.MinUDPSize, edns), 1232)
	}
	key := s.key(args[0], q.Question[0].Qtype, do, q.CheckingDisabled)
	now := s.cache.Now()
	clear(s.facts)
	var e Entry
	kind := Miss
	switch verb {
	case "QUERY":
		e, kind = s.cache.Lookup(key, now)
	case "PEEK":
		e, kind = s.cache.Peek(key, now)
	case "STALE":
		if stale, ok := s.cache.Stale(key, now); ok {
			e, kind = stale, Stale
		}
	}
	s.facts["kind"] = kind.String()
	switch kind {
	case Failed:
		f, ok := s.cache.Failure(key, now)
		if !ok {
			s.fatalf("failed, but without a failure")
		}
		s.facts["rcode"] = dns.RcodeToString[int(f.Rcode)]
		s.facts["ede"] = strconv.Itoa(int(f.EDE))
		s.facts["text"] = f.Text
	case Miss:
		if e != (Entry{}) {
			s.fatalf("a miss with an entry")
		}
	default:
		o.Stale = kind == Stale
		s.facts["prefetch"] = yes(e.PrefetchDue(now))
		s.reply(e, q, o)
	}
}

// reply notes what the entry answers to the query.
func (s *script) reply(e Entry, q *dns.Msg, o ReplyOptions) {
	s.t.Helper()
	query, err := q.Pack()
	if err != nil {
		s.fatalf("%v", err)
	}
	var parsed dnswire.Query
	if v := dnswire.ParseQuery(query, &parsed); v != dnswire.Accept {
		s.fatalf("query is not accepted: %v", v)
	}
	o.Now = s.cache.Now()
	reply := e.AppendReply([]byte("before"), query, &parsed, o)[len("before"):]
	var m dns.Msg
	if err := m.Unpack(reply); err != nil {
		s.fatalf("reply: %v", err)
	}
	if m.Id != q.Id || !m.Response || len(m.Question) != 1 {
		s.fatalf("no reply to the query:\n%v", &m)
	}
	f := s.facts
	f["rcode"] = dns.RcodeToString[m.Rcode]
	f["size"] = strconv.Itoa(len(reply))
	f["qname"] = m.Question[0].Name
	f["left"] = e.TTL(o.Now).String()
	f["an"], f["ns"] = strconv.Itoa(len(m.Answer)), strconv.Itoa(len(m.Ns))
	f["opt"], f["do"], f["ede"], f["keepalive"] = "none", "no", "none", "none"
	var ttls, owners, data []string
	ar := 0
	for _, rr := range append(append(append([]dns.RR(nil), m.Answer...), m.Ns...), m.Extra...) {
		if opt, ok := rr.(*dns.OPT); ok {
			f["opt"] = strconv.Itoa(int(opt.UDPSize()))
			f["do"] = yes(opt.Do())
			s.options(opt)
			continue
		}
		ttls = append(ttls, strconv.Itoa(int(rr.Header().Ttl)))
		owners = append(owners, rr.Header().Name)
		data = append(data, strings.ReplaceAll(strings.TrimPrefix(rr.String(), rr.Header().String()), " ", "_"))
	}
	for _, rr := range m.Extra {
		if rr.Header().Rrtype != dns.TypeOPT {
			ar++
		}
	}
	f["ar"] = strconv.Itoa(ar)
	f["ttl"], f["owner"], f["data"] = strings.Join(ttls, ","), strings.Join(owners, ","), strings.Join(data, ",")
	var flags []string
	for _, flag := range []struct {
		name string
		set  bool
	}{
		{"aa", m.Authoritative},
		{"tc", m.Truncated},
		{"rd", m.RecursionDesired},
		{"ra", m.RecursionAvailable},
		{"ad", m.AuthenticatedData},
		{"cd", m.CheckingDisabled},
		{"z", m.Zero},
	} {
		if flag.set {
			flags = append(flags, flag.name)
		}
	}
	f["flags"] = strings.Join(flags, ",")
}

func (s *script) options(opt *dns.OPT) {
	for _, o := range opt.Option {
		switch o := o.(type) {
		case *dns.EDNS0_EDE:
			s.facts["ede"] = strconv.Itoa(int(o.InfoCode))
		case *dns.EDNS0_TCP_KEEPALIVE:
			s.facts["keepalive"] = strconv.Itoa(int(o.Timeout))
		default:
			s.fatalf("an option that is not ours: %v", o)
		}
	}
}

func (s *script) fail(args []string) {
	f := Failure{Rcode: dnswire.RcodeServFail}
	for _, arg := range args[2:] {
		switch name, value, _ := strings.Cut(arg, "="); name {
		case "ede":
			f.EDE = uint16(s.int(value))
		case "text":
			f.Text = value
		default:
			s.fatalf("unknown %s", arg)
		}
	}
	s.cache.StoreFailure(s.key(args[0], s.qtype(args[1]), false, false), f, s.cache.Now())
}

// flood stores, or looks up, many names of one kind.
func (s *script) flood(verb string, args []string) {
	count, from, ttl, kind := s.int(args[0]), 0, 300, "positive"
	for _, arg := range args[1:] {
		switch name, value, _ := strings.Cut(arg, "="); name {
		case "from":
			from = s.int(value)
		case "ttl":
			ttl = s.int(value)
		default:
			kind = name
		}
	}
	for i := from; i < from+count; i++ {
		name := fmt.Sprintf("%d.flood.example.", i)
		key := s.key(name, dns.TypeA, false, false)
		now := s.cache.Now()
		if verb == "TOUCH" {
			s.cache.Lookup(key, now)
			continue
		}
		if kind == "failure" {
			s.cache.StoreFailure(key, Failure{Rcode: dnswire.RcodeServFail, Text: "no answer"}, now)
			continue
		}
		m := new(dns.Msg)
		m.SetQuestion(name, dns.TypeA)
		m.Response, m.Compress = true, true
		rr := fmt.Sprintf("%s %d IN A 192.0.2.1", name, ttl)
		if kind == "negative" {
			m.Rcode = dns.RcodeNameError
			rr = fmt.Sprintf("flood.example. %d IN SOA ns.flood.example. root.flood.example. 1 2 3 4 %d", ttl, ttl)
		}
		parsed, err := dns.NewRR(rr)
		if err != nil {
			s.fatalf("%v", err)
		}
		if kind == "negative" {
			m.Ns = append(m.Ns, parsed)
		} else {
			m.Answer = append(m.Answer, parsed)
		}
		wire, err := m.Pack()
		if err != nil {
			s.fatalf("%v", err)
		}
		var r dnswire.Response
		if err := dnswire.ParseResponse(wire, &r); err != nil {
			s.fatalf("%v", err)
		}
		if _, cached := s.cache.Store(key, wire, &r, now); !cached {
			s.fatalf("%s is not cached", name)
		}
	}
}

// check compares facts with what the script says.
func (s *script) check(args []string) {
	s.t.Helper()
	st := s.cache.Stats()
	facts := map[string]string{
		"entries": strconv.Itoa(st.Entries()), "evictions": strconv.FormatUint(st.Evictions(), 10),
		"used": strconv.FormatInt(st.Bytes*100/st.Size, 10), // per cent
	}
	for name, seg := range map[string]SegmentStats{
		"probation": st.Probation, "protected": st.Protected, "negative": st.Negative, "failures": st.Failures,
	} {
		facts[name] = strconv.Itoa(seg.Entries)
		facts[name+".evictions"] = strconv.FormatUint(seg.Evictions, 10)
		facts[name+".used"] = strconv.FormatInt(seg.Bytes*100/st.Size, 10)
	}
	maps.Copy(facts, s.facts)
	for _, arg := range args {
		i := strings.IndexAny(arg, "<>=")
		if i < 0 {
			s.fatalf("%q says nothing", arg)
		}
		name, op, want := arg[:i], arg[i:i+1], arg[i+1:]
		if op != "=" {
			op, want = arg[i:i+2], arg[i+2:]
		}
		got, ok := facts[name]
		if !ok {
			s.fatalf("nothing known of %s", name)
		}
		good := got == want
		switch op {
		case "<=":
			good = s.int(got) <= s.int(want)
		case ">=":
			good = s.int(got) >= s.int(want)
		}
		if !good {
			s.t.Errorf("%s:%d: step %d: %s is %q, want %s %q", s.file, s.line, s.step, name, got, op, want)
		}
	}
}
