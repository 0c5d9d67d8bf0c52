package config

import (
	"fmt"
	"math/bits"
	"strconv"
	"strings"
)

// A Mark holds the two bits of the packet mark that are ours. They are two
// because the routing rule matches the first: were our own upstream packets to
// carry it as well, they would be routed back to us.
type Mark uint32

// kubeProxyMarks are kube-proxy's masquerade bit (its default) and the drop bit
// that kubelets and older kube-proxies use: a packet of ours with one of them
// would be rewritten or lost.
const kubeProxyMarks Mark = 0x4000 | 0x8000

// Taken returns the bit of packets that we take: the lower one.
func (m Mark) Taken() uint32 { return uint32(m & -m) }

// Upstream returns the bit of our own upstream queries: the higher one.
func (m Mark) Upstream() uint32 { return uint32(m &^ (m & -m)) }

// String returns the mark in hexadecimal, as nft and ip print it.
func (m Mark) String() string { return fmt.Sprintf("%#x", uint32(m)) }

func parseMark(text string) (Mark, string) {
	digits, base := text, 10
	if rest, ok := strings.CutPrefix(strings.ToLower(text), "0x"); ok {
		digits, base = rest, 16
	}
	n, err := strconv.ParseUint(digits, base, 32)
	m := Mark(n)
	switch {
	case err != nil:
		return 0, "is not a 32-bit number"
	case bits.OnesCount32(uint32(m)) != 2:
		return 0, fmt.Sprintf("has %d of 32 bits set", bits.OnesCount32(uint32(m)))
	case m&kubeProxyMarks != 0:
		return 0, fmt.Sprintf("has a bit of kube-proxy's (%#x)", uint32(m&kubeProxyMarks))
	}
	return m, ""
}
