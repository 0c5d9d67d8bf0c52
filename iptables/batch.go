package iptables

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Attributes that package unix lacks, include/uapi/linux/netfilter/nf_tables.h.
const (
	nftaTableOwner = 7
	nftTableFOwner = 0x2 // Linux 5.12
)

// elementsPerMessage keeps a list of set elements below the 64 KiB that one
// netlink attribute can hold.
const elementsPerMessage = 500

// ackTimeout bounds the wait for what the kernel has sent already.
const ackTimeout = 5 * time.Second

// batch is an nftables transaction: the kernel applies all of it or nothing,
// and no packet sees half of it. Package nftables builds such batches too, but
// cannot set a table's flags, nor put a table, its sets and its rules into
// one batch with expressions of our own.
type batch struct {
	messages []netlink.Message
	names    []string // what each message does, for errors
	sets     uint32   // ids given so far
	err      error    // the first encoding that went wrong
}

// batchError says which part of a transaction the kernel refused.
type batchError struct {
	Op  string // for example "add rule dnsguard take4 1"
	Err error  // what the kernel said, a syscall.Errno inside
}

// Error returns "op: cause".
func (e *batchError) Error() string { return e.Op + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *batchError) Unwrap() error { return e.Err }

func (b *batch) add(name string, kind uint16, flags netlink.HeaderFlags, attrs ...netlink.Attribute) {
	data, err := netlink.MarshalAttributes(attrs)
	if err != nil && b.err == nil {
		b.err = fmt.Errorf("encode %s: %w", name, err)
	}
	b.messages = append(b.messages, netlink.Message{
		Header: netlink.Header{
			Type:  netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind),
			Flags: netlink.Request | netlink.Acknowledge | flags,
		},
		Data: append(nfgenmsg(inet, 0), data...),
	})
	b.names = append(b.names, name)
}

// nfgenmsg is the header of every nfnetlink message.
func nfgenmsg(family uint8, resource uint16) []byte {
	return append([]byte{family, unix.NFNETLINK_V0}, be16(resource)...)
}

func nested(kind uint16, b *batch, attrs ...netlink.Attribute) netlink.Attribute {
	data, err := netlink.MarshalAttributes(attrs)
	if err != nil && b.err == nil {
		b.err = err
	}
	return netlink.Attribute{Type: unix.NLA_F_NESTED | kind, Data: data}
}

// assert makes the kernel carry a table as it is meant, whatever part of it is
// there: rules and the members of constant sets are replaced; what the other
// sets have learned stays.
func (b *batch) assert(t *table) {
	var flags uint32
	if t.owner {
		flags = nftTableFOwner
	}
	b.add("add table "+t.name, unix.NFT_MSG_NEWTABLE, netlink.Create,
		netlink.Attribute{Type: unix.NFTA_TABLE_NAME, Data: cstring(t.name)},
		netlink.Attribute{Type: unix.NFTA_TABLE_FLAGS, Data: be32(flags)})
	for i := range t.sets {
		b.set(t, &t.sets[i])
	}
	for i := range t.chains {
		b.chain(t, &t.chains[i])
	}
	b.add("flush table "+t.name, unix.NFT_MSG_DELRULE, 0,
		netlink.Attribute{Type: unix.NFTA_RULE_TABLE, Data: cstring(t.name)})
	for i := range t.sets {
		if s := &t.sets[i]; s.constant() {
			b.add("flush set "+t.name+" "+s.name, unix.NFT_MSG_DELSETELEM, 0,
				netlink.Attribute{Type: unix.NFTA_SET_ELEM_LIST_TABLE, Data: cstring(t.name)},
				netlink.Attribute{Type: unix.NFTA_SET_ELEM_LIST_SET, Data: cstring(s.name)})
			b.elements(t, s)
		}
	}
	b.rules(t)
}

// remove deletes a table that must exist.
func (b *batch) remove(name string) {
	b.add("delete table "+name, unix.NFT_MSG_DELTABLE, 0,
		netlink.Attribute{Type: unix.NFTA_TABLE_NAME, Data: cstring(name)})
}

// nft's numbers for the types of keys, by which it knows how to show elements:
// ipv4_addr or ipv6_addr, inet_proto, inet_service; six bits each.
func (s *set) keyType() (kind, size uint32) {
	for _, k := range s.key {
		switch k {
		case keyAddr:
			kind, size = kind<<6|uint32([2]uint8{7, 8}[s.fam]), size+addrSize(s.fam)
		case keyProto:
			kind, size = kind<<6|12, size+4
		case keyPort:
			kind, size = kind<<6|13, size+4
		}
	}
	return kind, size
}

func (b *batch) set(t *table, s *set) {
	var flags uint32
	if s.interval {
		flags |= unix.NFT_SET_INTERVAL
	}
	if s.timed {
		flags |= unix.NFT_SET_TIMEOUT
	}
	if s.dynamic {
		flags |= unix.NFT_SET_EVAL
	}
	kind, size := s.keyType()
	b.sets++
	attrs := []netlink.Attribute{
		{Type: unix.NFTA_SET_TABLE, Data: cstring(t.name)},
		{Type: unix.NFTA_SET_NAME, Data: cstring(s.name)},
		{Type: unix.NFTA_SET_FLAGS, Data: be32(flags)},
		{Type: unix.NFTA_SET_KEY_TYPE, Data: be32(kind)},
		{Type: unix.NFTA_SET_KEY_LEN, Data: be32(size)},
		{Type: unix.NFTA_SET_ID, Data: be32(b.sets)},
	}
	if s.timeout > 0 {
		attrs = append(attrs, netlink.Attribute{Type: unix.NFTA_SET_TIMEOUT, Data: be64(uint64(s.timeout.Milliseconds()))})
	}
	if s.size > 0 {
		attrs = append(attrs, nested(unix.NFTA_SET_DESC, b, netlink.Attribute{Type: unix.NFTA_SET_DESC_SIZE, Data: be32(s.size)}))
	}
	b.add("add set "+t.name+" "+s.name, unix.NFT_MSG_NEWSET, netlink.Create, attrs...)
}

// element is one member of a set on its way to the kernel.
type element struct {
	key     []byte
	end     bool          // the first key after an interval
	timeout time.Duration // zero: for ever
}

// elements adds the constant members of a set.
func (b *batch) elements(t *table, s *set) {
	var list []element
	for _, v := range s.services {
		list = append(list, element{key: serviceKey(v)})
	}
	for _, p := range s.prefixes {
		list = append(list, element{key: p.Addr().AsSlice()})
		if next, ok := after(p); ok {
			list = append(list, element{key: next.AsSlice(), end: true})
		}
	}
	b.change("add", unix.NFT_MSG_NEWSETELEM, netlink.Create, t.name, s.name, list)
}

// change adds members to a set or deletes them.
func (b *batch) change(verb string, kind uint16, flags netlink.HeaderFlags, table, set string, list []element) {
	for len(list) > 0 {
		n := min(len(list), elementsPerMessage)
		var members []netlink.Attribute
		for _, e := range list[:n] {
			attrs := []netlink.Attribute{nested(unix.NFTA_SET_ELEM_KEY, b, netlink.Attribute{Type: unix.NFTA_DATA_VALUE, Data: e.key})}
			if e.end {
				attrs = append(attrs, netlink.Attribute{Type: unix.NFTA_SET_ELEM_FLAGS, Data: be32(unix.NFT_SET_ELEM_INTERVAL_END)})
			}
			if e.timeout > 0 {
				attrs = append(attrs, netlink.Attribute{Type: unix.NFTA_SET_ELEM_TIMEOUT, Data: be64(uint64(e.timeout.Milliseconds()))})
			}
			members = append(members, nested(unix.NFTA_LIST_ELEM, b, attrs...))
		}
		b.add(fmt.Sprintf("%s element %s %s", verb, table, set), kind, flags,
			netlink.Attribute{Type: unix.NFTA_SET_ELEM_LIST_TABLE, Data: cstring(table)},
			netlink.Attribute{Type: unix.NFTA_SET_ELEM_LIST_SET, Data: cstring(set)},
			nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, b, members...))
		list = list[n:]
	}
}

// put adds members, or gives those that are there a new timeout, which adding
// alone does not do.
func (b *batch) put(table, set string, list []element) {
	b.drop(table, set, list)
	b.change("add", unix.NFT_MSG_NEWSETELEM, netlink.Create, table, set, list)
}

// drop deletes members whether they are there or not: deleting one that has
// just timed out would fail the whole batch, so each is added first.
func (b *batch) drop(table, set string, list []element) {
	b.change("add", unix.NFT_MSG_NEWSETELEM, netlink.Create, table, set, list)
	b.change("delete", unix.NFT_MSG_DELSETELEM, 0, table, set, list)
}

// serviceKey and clientKey are keys as the rules' registers hold them: each
// part fills up 32-bit words.
func serviceKey(s Service) []byte {
	return append(clientKey(Client{s.Addr.Addr(), s.Proto}), byte(s.Addr.Port()>>8), byte(s.Addr.Port()), 0, 0)
}

func clientKey(c Client) []byte { return append(c.Addr.AsSlice(), byte(c.Proto), 0, 0, 0) }

// parseKey is the reverse of clientKey and serviceKey.
func parseKey(key []byte) (c Client, port uint16, ok bool) {
	size := 4
	if len(key) > 16 {
		size = 16
	}
	if len(key) < size+4 {
		return c, 0, false
	}
	addr, _ := netip.AddrFromSlice(key[:size])
	c = Client{Addr: addr, Proto: Proto(key[size])}
	if len(key) >= size+8 {
		port = uint16(key[size+4])<<8 | uint16(key[size+5])
	}
	return c, port, true
}

// after returns the first address behind a prefix, if there is one.
func after(p netip.Prefix) (netip.Addr, bool) {
	last := p.Addr().AsSlice()
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	addr, _ := netip.AddrFromSlice(last)
	next := addr.Next()
	return next, next.IsValid()
}

func (b *batch) chain(t *table, c *chain) {
	attrs := []netlink.Attribute{
		{Type: unix.NFTA_CHAIN_TABLE, Data: cstring(t.name)},
		{Type: unix.NFTA_CHAIN_NAME, Data: cstring(c.name)},
	}
	if h := c.hook; h != nil {
		attrs = append(attrs,
			nested(unix.NFTA_CHAIN_HOOK, b,
				netlink.Attribute{Type: unix.NFTA_HOOK_HOOKNUM, Data: be32(h.point)},
				netlink.Attribute{Type: unix.NFTA_HOOK_PRIORITY, Data: be32(uint32(h.priority))}),
			netlink.Attribute{Type: unix.NFTA_CHAIN_POLICY, Data: be32(nfAccept)},
			netlink.Attribute{Type: unix.NFTA_CHAIN_TYPE, Data: cstring(h.kind)})
	}
	b.add("add chain "+t.name+" "+c.name, unix.NFT_MSG_NEWCHAIN, netlink.Create, attrs...)
}

// nfAccept is NF_ACCEPT, include/uapi/linux/netfilter.h.
const nfAccept = 1

// rules adds the rules of every chain.
func (b *batch) rules(t *table) {
	for _, c := range t.chains {
		for i, r := range c.rules {
			var x expressions
			for _, s := range r {
				s.encode(&x)
			}
			if x.err != nil && b.err == nil {
				b.err = fmt.Errorf("encode rule %q: %w", r, x.err)
			}
			b.add(fmt.Sprintf("add rule %s %s %d (%s)", t.name, c.name, i, r), unix.NFT_MSG_NEWRULE, netlink.Create|netlink.Append,
				netlink.Attribute{Type: unix.NFTA_RULE_TABLE, Data: cstring(t.name)},
				netlink.Attribute{Type: unix.NFTA_RULE_CHAIN, Data: cstring(c.name)},
				nested(unix.NFTA_RULE_EXPRESSIONS, b, x.list...))
		}
	}
}

// commit applies the batch.
func (b *batch) commit(c *netlink.Conn) error { return b.send(c, true) }

// try lets the kernel check the batch and throw it away: a batch without its
// end is aborted, which is how "nft --check" works.
func (b *batch) try(c *netlink.Conn) error { return b.send(c, false) }

func (b *batch) send(c *netlink.Conn, end bool) error {
	if b.err != nil {
		return b.err
	}
	messages := append([]netlink.Message{control(unix.NFNL_MSG_BATCH_BEGIN)}, b.messages...)
	if end {
		messages = append(messages, control(unix.NFNL_MSG_BATCH_END))
	}
	size := 0
	for _, m := range messages {
		size += unix.NLMSG_HDRLEN + len(m.Data) + unix.NLMSG_ALIGNTO
	}
	if err := growBuffers(c, size); err != nil {
		return err
	}
	if _, err := c.SendMessages(messages); err != nil {
		return fmt.Errorf("send nftables batch: %w", err)
	}
	// The kernel has done it all when the send returns: one acknowledgement a
	// message waits in the socket, in order. The deadline only keeps a kernel
	// that behaves otherwise from holding us for ever.
	if err := c.SetReadDeadline(time.Now().Add(ackTimeout)); err != nil {
		return err
	}
	for _, name := range b.names {
		if _, err := c.Receive(); err != nil {
			err = &batchError{Op: name, Err: err}
			return errors.Join(err, discard(c))
		}
	}
	return nil
}

// control is a message that begins or ends a batch.
func control(kind uint16) netlink.Message {
	return netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(kind), Flags: netlink.Request},
		Data:   nfgenmsg(unix.NFPROTO_UNSPEC, unix.NFNL_SUBSYS_NFTABLES),
	}
}

// growBuffers makes room for a batch, which must be one datagram, and for its
// acknowledgements. With NET_ADMIN, without which nothing here works, the
// limits net.core.wmem_max and rmem_max do not apply.
func growBuffers(c *netlink.Conn, size int) error {
	const enough = 128 << 10 // below the usual default
	if size < enough {
		return nil
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	size = min(2*size, math.MaxInt32)
	cerr := raw.Control(func(fd uintptr) {
		err = errors.Join(
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, size),
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, size),
		)
	})
	if err = errors.Join(cerr, err); err != nil {
		return fmt.Errorf("enlarge netlink socket buffers: %w", err)
	}
	return nil
}

// discard empties a socket of the acknowledgements that follow an error.
func discard(c *netlink.Conn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	buf := make([]byte, unix.Getpagesize())
	return raw.Control(func(fd uintptr) {
		for {
			_, _, err := unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT)
			if err != nil && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.ENOBUFS) {
				return
			}
		}
	})
}
