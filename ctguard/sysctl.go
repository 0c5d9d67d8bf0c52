package ctguard

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"time"
)

// procFile is a file under /proc, kept open. /proc/sys/net and /proc/net show
// the network namespace of the thread that opens a file; the open file keeps
// showing it, with its present content, to whatever thread reads it.
type procFile struct {
	path string
	file *os.File
	err  error // why it could not be opened
}

func openProc(path string) procFile {
	f, err := os.Open(path)
	return procFile{path, f, err}
}

func (p procFile) read() ([]byte, error) {
	if p.err != nil {
		return nil, p.err
	}
	return io.ReadAll(io.NewSectionReader(p.file, 0, math.MaxInt64))
}

// value reads a number.
func (p procFile) value() (uint64, error) {
	b, err := p.read()
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(string(bytes.TrimSpace(b)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", p.path, err)
	}
	return n, nil
}

// sysctls are the files that tell what netlink does not.
type sysctls struct {
	unreplied, stream, events, ipvs procFile
}

func openSysctls() sysctls {
	const dir = "/proc/sys/net/netfilter/"
	return sysctls{
		unreplied: openProc(dir + "nf_conntrack_udp_timeout"),
		stream:    openProc(dir + "nf_conntrack_udp_timeout_stream"),
		events:    openProc(dir + "nf_conntrack_events"),
		ipvs:      openProc("/proc/thread-self/net/ip_vs"),
	}
}

func (s sysctls) Close() error {
	var errs []error
	for _, p := range []procFile{s.unreplied, s.stream, s.events, s.ipvs} {
		if p.file != nil {
			errs = append(errs, p.file.Close())
		}
	}
	return errors.Join(errs...)
}

// Timeouts implements [Host]. Minimum: Linux 2.6.14.
func (k *Kernel) Timeouts() (Timeouts, error) {
	unreplied, err := k.sysctls.unreplied.value()
	if err != nil {
		return Timeouts{}, fmt.Errorf("read UDP timeout: %w", err)
	}
	stream, err := k.sysctls.stream.value()
	if err != nil {
		return Timeouts{}, fmt.Errorf("read UDP timeout: %w", err)
	}
	return Timeouts{
		Unreplied: time.Duration(unreplied) * time.Second,
		Stream:    time.Duration(stream) * time.Second,
	}, nil
}

// VirtualServers implements [Host], from /proc/net/ip_vs.
func (k *Kernel) VirtualServers() ([]netip.AddrPort, error) {
	b, err := k.sysctls.ipvs.read()
	if errors.Is(err, os.ErrNotExist) {
		// The module may have come since.
		b, err = os.ReadFile(k.sysctls.ipvs.path)
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list IPVS virtual servers: %w", err)
	}
	return parseIPVS(b)
}

// parseIPVS reads lines such as
//
//	UDP  0A60000A:0035 rr
//	UDP  [fd00:0000:0000:0000:0000:0000:0000:000a]:0035 rr
//
// and skips those of other protocols, of fwmarks and of real servers.
func parseIPVS(b []byte) ([]netip.AddrPort, error) {
	var vs []netip.AddrPort
	for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
		fields := bytes.Fields(s.Bytes())
		if len(fields) < 2 || string(fields[0]) != "UDP" {
			continue
		}
		at := bytes.LastIndexByte(fields[1], ':')
		if at < 0 {
			return nil, fmt.Errorf("list IPVS virtual servers: line %q", s.Text())
		}
		port, err := strconv.ParseUint(string(fields[1][at+1:]), 16, 16)
		if err != nil {
			return nil, fmt.Errorf("list IPVS virtual servers: line %q: %w", s.Text(), err)
		}
		addr, err := parseIPVSAddr(string(fields[1][:at]))
		if err != nil {
			return nil, fmt.Errorf("list IPVS virtual servers: line %q: %w", s.Text(), err)
		}
		vs = append(vs, netip.AddrPortFrom(addr, uint16(port)))
	}
	slices.SortFunc(vs, netip.AddrPort.Compare)
	return vs, nil
}

func parseIPVSAddr(s string) (netip.Addr, error) {
	if len(s) > 2 && s[0] == '[' && s[len(s)-1] == ']' {
		return netip.ParseAddr(s[1 : len(s)-1])
	}
	b, err := hex.DecodeString(s)
	if err != nil {
		return netip.Addr{}, err
	}
	a, ok := netip.AddrFromSlice(b)
	if !ok || !a.Is4() {
		return netip.Addr{}, fmt.Errorf("address %q has %d bytes", s, len(b))
	}
	return a, nil
}
