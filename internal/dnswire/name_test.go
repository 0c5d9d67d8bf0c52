package dnswire

import (
	"bytes"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

// longName is a name of n octets in wire form.
func longName(n int) string {
	var b strings.Builder
	for n--; n > 0; {
		l := min(n-1, maxLabel)
		if n-1-l == 1 { // no room for another label behind it
			l--
		}
		b.WriteString(string(wire(byte(l), strings.Repeat("x", l))))
		n -= 1 + l
	}
	return b.String() + "\x00"
}

func TestFold(t *testing.T) {
	for c := range 256 {
		want := byte(c)
		if 'A' <= c && c <= 'Z' {
			want += 'a' - 'A'
		}
		if got := fold(byte(c)); got != want {
			t.Errorf("fold(%#x) = %#x, want %#x", c, got, want)
		}
	}
}

func TestAppendFolded(t *testing.T) {
	in := wireName(t, `wWw.\193BC.ExAmple.`) // 193 is a capital letter in Latin-1, but not in ASCII
	got := AppendFolded([]byte("HEAD"), in)
	if want := "HEAD\x03www\x03\xc1bc\x07example\x00"; string(got) != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestEqualFold(t *testing.T) {
	tests := []struct {
		name string
		a, b string
		want bool
	}{
		{"same", "\x03www\x00", "\x03www\x00", true},
		{"case", "\x03wWw\x02EX\x00", "\x03WwW\x02ex\x00", true},
		{"root", "\x00", "\x00", true},
		{"empty", "", "", true},
		{"other letter", "\x03wwx\x00", "\x03www\x00", false},
		{"other length", "\x03www\x00", "\x04wwww\x00", false},
		{"other cut into labels", "\x03a\x01b\x00", "\x01a\x03b\x00\x00", false},
		{"other label lengths", "\x01a\x01b\x00", "\x03a\x01b\x00", false},
		{"neighbours of the letters", "\x02@[\x00", "\x02`{\x00", false},
		{"not ASCII", "\x01\xc1\x00", "\x01\xe1\x00", false},
		{"question", "\x01A\x00\x00\x01\x00\x01", "\x01a\x00\x00\x01\x00\x01", true},
		{"question, other class", "\x01a\x00\x00\x01\x00\x01", "\x01a\x00\x00\x01\x00\x03", false},
		{"question, type 65 is not type 97", "\x01a\x00\x00A\x00\x01", "\x01a\x00\x00a\x00\x01", false},
		{"cut short", "\x05www", "\x05WWW", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := EqualFold([]byte(tt.a), []byte(tt.b)); got != tt.want {
				t.Errorf("EqualFold(%q, %q) = %t, want %t", tt.a, tt.b, got, tt.want)
			}
			if got := EqualFold([]byte(tt.b), []byte(tt.a)); got != tt.want {
				t.Errorf("EqualFold(%q, %q) = %t, want %t", tt.b, tt.a, got, tt.want)
			}
		})
	}
}

func TestPlainNameLen(t *testing.T) {
	tests := []struct {
		name string
		in   string
		want int // 0: malformed
	}{
		{"root", "\x00", 1},
		{"two labels", "\x03www\x07example\x00\x00\x01", 13},
		{"label of 63 octets", "\x3f" + strings.Repeat("x", 63) + "\x00", 65},
		{"label of 64 octets", "\x40" + strings.Repeat("x", 64) + "\x00", 0},
		{"label type 0x80", "\x80" + strings.Repeat("x", 128) + "\x00", 0},
		{"pointer", "\xc0\x00", 0},
		{"255 octets", longName(255), 255},
		{"256 octets", longName(256), 0},
		{"127 labels", strings.Repeat("\x01a", 127) + "\x00", 255},
		{"128 labels", strings.Repeat("\x01a", 128) + "\x00", 0},
		{"empty", "", 0},
		{"cut in a label", "\x03ww", 0},
		{"cut before the root", "\x03www", 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			in := exact(append([]byte("prefix"), tt.in...))
			got, err := plainNameLen(in, 6)
			if got != tt.want || (err != nil) != (tt.want == 0) {
				t.Errorf("plainNameLen(%q) = %d, %v, want %d", tt.in, got, err, tt.want)
			}
		})
	}
}

// pointerChain is a header, a root name, and n pointers each to the one before
// it. The last starts at the returned offset.
func pointerChain(n int) (msg []byte, off int) {
	msg = append(make([]byte, HeaderLen), 0)
	to := HeaderLen
	for range n {
		off = len(msg)
		msg = append(msg, 0xc0|byte(to>>8), byte(to))
		to = off
	}
	return msg, off
}

// TestNameEnd checks nameEnd and, on accepted names, AppendName. Offsets start
// with the first octet of body, at 12.
func TestNameEnd(t *testing.T) {
	chain := func(n int) string {
		msg, _ := pointerChain(n)
		return string(msg[HeaderLen:])
	}
	// labelChain is one label of a name of n labels, then a pointer to the
	// labels in front of it, and so on.
	labelChain := func(n int) string {
		b := []byte("\x00")
		to := HeaderLen
		for range n {
			at := HeaderLen + len(b)
			b = append(b, 1, 'L', 0xc0|byte(to>>8), byte(to))
			to = at
		}
		return string(b)
	}
	tests := []struct {
		name string
		body string
		off  int
		end  int    // 0: malformed
		want string // folded
	}{
		{"root", "\x00", 12, 13, "\x00"},
		{"plain", "\x03WWW\x00rest", 12, 17, "\x03www\x00"},
		{"pointer", "\x03WWW\x00\xc0\x0crest", 17, 19, "\x03www\x00"},
		{"pointer into a name", "\x03www\x02EX\x00\xc0\x10", 20, 22, "\x02ex\x00"},
		{"labels and a pointer", "\x02EX\x00\x03www\xc0\x0c", 16, 22, "\x03www\x02ex\x00"},
		{"pointer to a pointer", "\x02EX\x00\xc0\x0c\xc0\x10", 18, 20, "\x02ex\x00"},
		{"pointer to the root", "\x00\xc0\x0c", 13, 15, "\x00"},
		{"126 pointers", chain(126), 12 + 1 + 2*125, 12 + 1 + 2*126, "\x00"},
		{"127 pointers", chain(127), 12 + 1 + 2*126, 0, ""},
		{"126 labels and pointers", labelChain(126), 12 + 1 + 4*125, 12 + 1 + 4*126, strings.Repeat("\x01l", 126) + "\x00"},
		{"127 labels and pointers", labelChain(127), 12 + 1 + 4*126, 0, ""},
		{"255 octets through a pointer", longName(251) + "\x03www\xc0\x0c", 12 + 251, 12 + 251 + 6, "\x03www" + longName(251)},
		{"256 octets through a pointer", longName(252) + "\x03www\xc0\x0c", 12 + 252, 0, ""},
		{"pointer to itself", "\xc0\x0c", 12, 0, ""},
		{"loop of two pointers", "\xc0\x0e\xc0\x0c", 14, 0, ""},
		{"loop through a label", "\x03www\xc0\x0c", 12, 0, ""},
		// No loop, but no prior occurrence of a name either.
		{"pointer into its own label", "\x03w\x00w\xc0\x0e", 12, 0, ""},
		{"pointer to labels that go on with the pointer", "\x03www\xc0\x0c", 16, 0, ""},
		{"pointer to a label that covers the pointer", "\x05www\xc0\x0c\x00", 16, 0, ""},
		{"pointer to a pointer whose second octet is the name's first", "\x00\x01x\xc0\x0c" + strings.Repeat("x", 12) + "\xc0\x0d", 16, 0, ""},
		{"pointer to a pointer into its own label", "\x03w\x00w\xc0\x0e\xc0\x0c", 18, 0, ""},
		{"forward pointer", "\xc0\x0e\x00", 12, 0, ""},
		{"forward pointer behind a label", "\x03www\xc0\x12\x00", 12, 0, ""},
		{"pointer into the header", "\x00\xc0\x0b", 13, 0, ""},
		{"pointer to octet 0", "\x00\xc0\x00", 13, 0, ""},
		{"pointer past the end", "\x00\xff\xff", 13, 0, ""},
		{"pointer cut short", "\x00\xc0", 13, 0, ""},
		{"label type 0x40", "\x40\x00", 12, 0, ""},
		{"label type 0x80", "\x80\x00", 12, 0, ""},
		{"bad label type behind a pointer", "\x80\x00\xc0\x0c", 14, 0, ""},
		{"name behind a pointer cut by the label", "\x7f\x00\xc0\x0c", 14, 0, ""},
		{"label cut short", "\x03ww", 12, 0, ""},
		{"no root octet", "\x03www", 12, 0, ""},
		{"empty", "", 12, 0, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			msg := exact(append(make([]byte, HeaderLen), tt.body...))
			end, err := nameEnd(msg, tt.off)
			if end != tt.end || (err != nil) != (tt.end == 0) {
				t.Fatalf("nameEnd = %d, %v, want %d", end, err, tt.end)
			}
			if err != nil {
				return
			}
			if got := AppendName([]byte("H"), msg, tt.off); string(got) != "H"+tt.want {
				t.Errorf("AppendName = %q, want %q", got, "H"+tt.want)
			}
		})
	}
}

// TestNamesNotAccepted: AppendName and NameEqual are for accepted names, but
// return whatever they are given.
func TestNamesNotAccepted(t *testing.T) {
	tests := []struct {
		name string
		body string
		want string
	}{
		{"empty", "", ""},
		{"label cut short", "\x03ww", ""},
		{"second label cut short", "\x01W\x03ww", "\x01w"},
		{"no root octet", "\x03WWW", "\x03www"},
		{"pointer cut short", "\x01W\xc0", "\x01w"},
		{"pointer to itself", "\x01W\xc0\x0e", "\x01w"},
		{"forward pointer", "\xc0\x0e\x00", ""},
		{"loop through a label", "\x03www\xc0\x0c", strings.Repeat("\x03www", 128)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			// The same octets twice, so that NameEqual cannot stop at once.
			msg := exact(append(make([]byte, HeaderLen), tt.body...))
			if got := AppendName(nil, msg, HeaderLen); string(got) != tt.want {
				t.Errorf("AppendName = %q, want %q", got, tt.want)
			}
			msg = exact(append(msg, "\x04next\x00"...))
			NameEqual(msg, HeaderLen, HeaderLen+len(tt.body))
			NameEqual(msg, HeaderLen+len(tt.body), len(msg))
		})
	}
	t.Run("two loops of equal labels", func(t *testing.T) {
		msg := exact(append(make([]byte, HeaderLen), "\x01a\xc0\x0c\x01A\xc0\x10"...))
		if NameEqual(msg, 12, 16) {
			t.Error("two names without an end are equal")
		}
	})
	t.Run("equal labels cut short", func(t *testing.T) {
		msg := exact(append(make([]byte, HeaderLen), "\x02\x02a"...))
		if NameEqual(msg, 12, 13) {
			t.Error("names that are cut short are equal")
		}
	})
}

func TestNameEqual(t *testing.T) {
	// Offsets:              12      16     20    21            27     29
	const body = "\x03www" + "\x02EX" + "\x00" + "\x03WwW\xc0\x10" + "\xc0\x0c" + "\x02ey\x00"
	msg := exact(append(make([]byte, HeaderLen), body...))
	tests := []struct {
		name string
		a, b int
		want bool
	}{
		{"itself", 12, 12, true},
		{"compressed, other case", 12, 20, true},
		{"pointer to it", 12, 26, true},
		{"two pointers", 20, 26, true},
		{"suffix", 12, 16, false},
		{"other letters", 16, 28, false},
		{"root and another", 19, 16, false},
		{"two roots", 19, 31, true},
	}
	t.Run("127 labels", func(t *testing.T) {
		one := strings.Repeat("\x01a", 127) + "\x00"
		msg := exact(append(make([]byte, HeaderLen), one+strings.ToUpper(one)...))
		if !NameEqual(msg, HeaderLen, HeaderLen+len(one)) {
			t.Error("not equal")
		}
	})
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := NameEqual(msg, tt.a, tt.b); got != tt.want {
				t.Errorf("NameEqual(%d, %d) = %t, want %t", tt.a, tt.b, got, tt.want)
			}
			if got := NameEqual(msg, tt.b, tt.a); got != tt.want {
				t.Errorf("NameEqual(%d, %d) = %t, want %t", tt.b, tt.a, got, tt.want)
			}
		})
	}
}

func TestIsSubdomain(t *testing.T) {
	tests := []struct {
		child, parent string
		want          bool
	}{
		{"www.example.", "example.", true},
		{"example.", "example.", true},
		{"a.b.c.example.", "c.example.", true},
		{"www.example.", ".", true},
		{".", ".", true},
		{".", "example.", false},
		{"example.", "www.example.", false},
		{"notexample.", "example.", false},
		{"www.example.", "example.org.", false},
		{"example.org.", "example.", false},
		// The octets of the parent within a label of the child.
		{`x\007example.`, "example.", false},
		{`x\007example\000.`, "example.", false},
	}
	for _, tt := range tests {
		if got := IsSubdomain(foldedName(t, tt.child), foldedName(t, tt.parent)); got != tt.want {
			t.Errorf("IsSubdomain(%s, %s) = %t, want %t", tt.child, tt.parent, got, tt.want)
		}
	}
	for _, child := range []string{"", "\x03ab", "\x03abc"} { // not names
		if IsSubdomain([]byte(child), []byte("\x03com\x00")) {
			t.Errorf("IsSubdomain(%q, com.)", child)
		}
	}
}

func TestLabelCount(t *testing.T) {
	for _, name := range []string{".", "com.", "www.example.com.", strings.Repeat("a.", 127)} {
		if got, want := LabelCount(wireName(t, name)), dns.CountLabel(name); got != want {
			t.Errorf("LabelCount(%s) = %d, want %d", name, got, want)
		}
	}
	if got := LabelCount(nil); got != 0 {
		t.Errorf("LabelCount(nil) = %d", got)
	}
}

func TestLongName(t *testing.T) { // the tests above lean on it
	for n := 3; n <= 300; n++ {
		name := longName(n)
		if len(name) != n {
			t.Errorf("longName(%d) has %d octets", n, len(name))
		}
		off := 0
		for off < n && name[off] != 0 {
			if name[off] > maxLabel {
				t.Errorf("longName(%d) has a label of %d octets", n, name[off])
			}
			off += 1 + int(name[off])
		}
		if off != n-1 {
			t.Errorf("longName(%d) ends at %d", n, off)
		}
	}
}

// AppendFolded is fold of each octet, whatever stands at whatever place of a word.
func TestAppendFoldedWords(t *testing.T) {
	for n := range 40 {
		for c := range 256 {
			for at := range n {
				name := bytes.Repeat([]byte{'z'}, n)
				for i := range name {
					name[i] = "Zz@[`{\x00\xff\xdaA"[(i+n)%10]
				}
				name[at] = byte(c)
				want := []byte("before")
				for _, o := range name {
					want = append(want, fold(o))
				}
				if got := AppendFolded([]byte("before"), name); !bytes.Equal(got, want) {
					t.Fatalf("AppendFolded(%q) = %q, want %q", name, got, want)
				}
			}
		}
	}
}
