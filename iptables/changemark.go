package iptables

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// changeMark is something cheap to read that changes when anybody changes
// iptables rules.
type changeMark struct {
	generation uint32 // the variant on nftables
	raw        [2]xtInfo
}

// xtInfo is struct ipt_getinfo, and ip6t_getinfo which is the same,
// include/uapi/linux/netfilter_ipv4/ip_tables.h.
type xtInfo struct {
	name       [32]byte
	validHooks uint32
	entries    [5]uint32
	underflows [5]uint32
	number     uint32 // of rules
	size       uint32 // of all rules, octets
}

// getInfo is IPT_SO_GET_INFO and IP6T_SO_GET_INFO.
const getInfo = 64

func readChangeMark(legacy bool) (changeMark, error) {
	if !legacy {
		r, err := openRuleset()
		if err != nil {
			return changeMark{}, err
		}
		defer func() { _ = r.Close() }()
		id, err := r.generation()
		return changeMark{generation: id}, err
	}
	var m changeMark
	for fam, names := range [2]string{"/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"} {
		// To ask for a table would make the kernel create it.
		tables, err := os.ReadFile(names)
		if err != nil || !slices.Contains(strings.Fields(string(tables)), "raw") {
			continue
		}
		if m.raw[fam], err = rawInfo(fam); err != nil {
			return m, err
		}
	}
	return m, nil
}

// rawInfo asks for the number and size of the rules in table raw.
func rawInfo(fam int) (info xtInfo, err error) {
	domain, level := unix.AF_INET, unix.SOL_IP
	if fam == 1 {
		domain, level = unix.AF_INET6, unix.SOL_IPV6
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return info, fmt.Errorf("open socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	copy(info.name[:], "raw")
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), getInfo,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return info, fmt.Errorf("read size of table raw: %w", errno)
	}
	return info, nil
}
