package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// ruleset reads the kernel's nftables. It is opened for each look: what is
// left over from a dump that broke off cannot disturb the next.
type ruleset struct{ *netlink.Conn }

func openRuleset() (*ruleset, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("connect to nftables: %w", err)
	}
	return &ruleset{c}, nil
}

// noSockets tells whether an error means that no socket can be had at present, for
// want of descriptors or of memory.
func noSockets(err error) bool {
	for _, lack := range []error{unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM} {
		if errors.Is(err, lack) {
			return true
		}
	}
	return false
}

// get asks for one object, or with netlink.Dump for all that match.
func (r *ruleset) get(kind uint16, flags netlink.HeaderFlags, attrs ...netlink.Attribute) ([]netlink.Message, error) {
	data, err := netlink.MarshalAttributes(attrs)
	if err != nil {
		return nil, err
	}
	return r.Execute(netlink.Message{
		Header: netlink.Header{
			Type:  netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind),
			Flags: netlink.Request | flags,
		},
		Data: append(nfgenmsg(inet, 0), data...),
	})
}

// each decodes the attributes behind the nfnetlink header of every message.
func each(messages []netlink.Message, yield func(ad *netlink.AttributeDecoder)) error {
	for _, m := range messages {
		if len(m.Data) < len(nfgenmsg(0, 0)) {
			return errors.New("nftables message is too short")
		}
		ad, err := netlink.NewAttributeDecoder(m.Data[len(nfgenmsg(0, 0)):])
		if err != nil {
			return err
		}
		ad.ByteOrder = binary.BigEndian
		for ad.Next() {
			yield(ad)
		}
		if err := ad.Err(); err != nil {
			return err
		}
	}
	return nil
}

// generation is a number that every change of anybody's rules moves on. The
// updates that rules make to sets do not. Linux 3.18.
func (r *ruleset) generation() (uint32, error) {
	messages, err := r.get(unix.NFT_MSG_GETGEN, 0)
	if err != nil {
		return 0, fmt.Errorf("read nftables generation: %w", err)
	}
	var id uint32
	err = each(messages, func(ad *netlink.AttributeDecoder) {
		if ad.Type() == unix.NFTA_GEN_ID {
			id = ad.Uint32()
		}
	})
	return id, err
}

// tableInfo is what the kernel says about a table.
type tableInfo struct {
	name  string
	owned bool // it belongs to a socket
}

// table looks a table of family inet up.
func (r *ruleset) table(name string) (info tableInfo, exists bool, err error) {
	messages, err := r.get(unix.NFT_MSG_GETTABLE, 0, netlink.Attribute{Type: unix.NFTA_TABLE_NAME, Data: cstring(name)})
	if errors.Is(err, unix.ENOENT) {
		return info, false, nil
	}
	if err != nil {
		return info, false, fmt.Errorf("look up table %s: %w", name, err)
	}
	infos, err := tableInfos(messages)
	if err != nil || len(infos) == 0 {
		return info, false, err
	}
	return infos[0], true, nil
}

// allTables lists the tables of family inet.
func (r *ruleset) allTables() ([]tableInfo, error) {
	messages, err := r.get(unix.NFT_MSG_GETTABLE, netlink.Dump)
	if err != nil {
		return nil, fmt.Errorf("list tables: %w", err)
	}
	return tableInfos(messages)
}

func tableInfos(messages []netlink.Message) ([]tableInfo, error) {
	var out []tableInfo
	for _, m := range messages {
		var info tableInfo
		err := each([]netlink.Message{m}, func(ad *netlink.AttributeDecoder) {
			switch ad.Type() {
			case unix.NFTA_TABLE_NAME:
				info.name = ad.String()
			case unix.NFTA_TABLE_FLAGS:
				info.owned = ad.Uint32()&nftTableFOwner != 0
			}
		})
		if err != nil {
			return nil, err
		}
		out = append(out, info)
	}
	return out, nil
}

// image returns what the kernel has of a table, as octets to compare: its
// rules with their handles, its base chains with their policies, and the
// members of its constant sets. It is nil if rules are missing, or too many: then
// somebody has changed the table, and it is nothing to compare with later.
func (r *ruleset) image(t *table) ([]byte, error) {
	var out []byte
	look := func(what string, kind uint16, flags netlink.HeaderFlags, attrs ...netlink.Attribute) ([]netlink.Message, error) {
		messages, err := r.get(kind, flags, attrs...)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, fmt.Errorf("read %s of table %s: %w", what, t.name, err)
		}
		return messages, nil
	}
	rules, err := look("rules", unix.NFT_MSG_GETRULE, netlink.Dump,
		netlink.Attribute{Type: unix.NFTA_RULE_TABLE, Data: cstring(t.name)})
	missing := -len(rules)
	out = appendData(out, rules)
	for _, c := range t.chains {
		missing += len(c.rules)
		if c.hook != nil && err == nil {
			var chains []netlink.Message
			chains, err = look("chain "+c.name, unix.NFT_MSG_GETCHAIN, 0,
				netlink.Attribute{Type: unix.NFTA_CHAIN_TABLE, Data: cstring(t.name)},
				netlink.Attribute{Type: unix.NFTA_CHAIN_NAME, Data: cstring(c.name)})
			out = appendData(out, chains)
		}
	}
	for i := range t.sets {
		if s := &t.sets[i]; s.constant() && err == nil {
			var members []netlink.Message
			members, err = look("set "+s.name, unix.NFT_MSG_GETSETELEM, netlink.Dump,
				netlink.Attribute{Type: unix.NFTA_SET_ELEM_LIST_TABLE, Data: cstring(t.name)},
				netlink.Attribute{Type: unix.NFTA_SET_ELEM_LIST_SET, Data: cstring(s.name)})
			if err == nil {
				out, err = appendMembers(out, s.name, members)
			}
		}
	}
	if err != nil || missing != 0 {
		return nil, err
	}
	return out, nil
}

func appendData(out []byte, messages []netlink.Message) []byte {
	for _, m := range messages {
		out = append(out, m.Data[len(nfgenmsg(0, 0)):]...)
	}
	return out
}

// appendMembers appends the members of a set in the order of their octets: the
// kernel rearranges its hash tables whenever it likes.
func appendMembers(out []byte, set string, messages []netlink.Message) ([]byte, error) {
	var members [][]byte
	err := each(messages, func(ad *netlink.AttributeDecoder) {
		if ad.Type() == unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			ad.Nested(func(list *netlink.AttributeDecoder) error {
				for list.Next() {
					members = append(members, list.Bytes())
				}
				return nil
			})
		}
	})
	slices.SortFunc(members, bytes.Compare)
	return slices.Concat(out, cstring(set), slices.Concat(members...)), err
}

// member is one member of a set in the kernel, whose key is a client or a
// service.
type member struct {
	client  Client // or the service's address and protocol
	port    uint16
	expires time.Duration
	packets uint64 // of its counter
}

// members reads a set; one that is not there has none. A dump takes no lock
// that a transaction holds, so it is not delayed by kube-proxy's.
func (r *ruleset) members(table, set string, yield func(member)) error {
	messages, err := r.get(unix.NFT_MSG_GETSETELEM, netlink.Dump,
		netlink.Attribute{Type: unix.NFTA_SET_ELEM_LIST_TABLE, Data: cstring(table)},
		netlink.Attribute{Type: unix.NFTA_SET_ELEM_LIST_SET, Data: cstring(set)})
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err == nil {
		err = each(messages, func(ad *netlink.AttributeDecoder) {
			if ad.Type() == unix.NFTA_SET_ELEM_LIST_ELEMENTS {
				ad.Nested(func(list *netlink.AttributeDecoder) error {
					for list.Next() {
						list.Nested(func(e *netlink.AttributeDecoder) error {
							if m, ok := decodeMember(e); ok {
								yield(m)
							}
							return nil
						})
					}
					return nil
				})
			}
		})
	}
	if err != nil {
		return fmt.Errorf("read set %s of table %s: %w", set, table, err)
	}
	return nil
}

// everyMember reads a set of each family, of the process in a slot.
func (r *ruleset) everyMember(slot int, base string, yield func(member)) error {
	for fam := range 2 {
		if err := r.members(tableName(slot), setName(base, fam), yield); err != nil {
			return err
		}
	}
	return nil
}

// alive returns those of the services that are in @alive, and for how long.
func (r *ruleset) alive(slot int, services []Service) (map[Service]time.Duration, error) {
	out := make(map[Service]time.Duration)
	err := r.everyMember(slot, setAlive, func(m member) {
		s := Service{Addr: netip.AddrPortFrom(m.client.Addr, m.port), Proto: m.client.Proto}
		if slices.Contains(services, s) {
			out[s] = m.expires
		}
	})
	return out, err
}

func decodeMember(ad *netlink.AttributeDecoder) (m member, ok bool) {
	for ad.Next() {
		switch ad.Type() {
		case unix.NFTA_SET_ELEM_KEY:
			ad.Nested(func(key *netlink.AttributeDecoder) error {
				for key.Next() {
					m.client, m.port, ok = parseKey(key.Bytes())
				}
				return nil
			})
		case unix.NFTA_SET_ELEM_EXPIRATION:
			m.expires = time.Duration(ad.Uint64()) * time.Millisecond
		case unix.NFTA_SET_ELEM_EXPR: // the counter, the only expression of our sets
			ad.Nested(func(expr *netlink.AttributeDecoder) error {
				for expr.Next() {
					if expr.Type() == unix.NFTA_EXPR_DATA {
						expr.Nested(func(counter *netlink.AttributeDecoder) error {
							for counter.Next() {
								if counter.Type() == unix.NFTA_COUNTER_PACKETS {
									m.packets = counter.Uint64()
								}
							}
							return nil
						})
					}
				}
				return nil
			})
		}
	}
	return m, ok
}
