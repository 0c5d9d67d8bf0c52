package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"

	"github.com/miekg/dns"
)

// names yields the questions to ask, in wire form.
type names interface {
	// next writes one question over dst and returns its length.
	next(dst []byte) int
	// longest is the greatest length that next returns.
	longest() int
	// count is how many distinct questions there are, 0 for a stream without end.
	count() int
	// shuffle makes next choose at random from then on; before, it goes in order.
	shuffle()
}

// pattern is a name with a run of # in it, replaced by a number of that many digits.
type pattern struct {
	question []byte // the template
	digits   []byte // the run, inside question
	n        uint64 // numbers below n; 0: no end
	at       uint64
	random   bool
	rng      *rand.PCG
}

func newPattern(name, qtype string, n, first uint64) (*pattern, error) {
	start := strings.IndexByte(name, '#')
	if start < 0 {
		return nil, fmt.Errorf("name pattern %q has no #", name)
	}
	end := start + strings.IndexFunc(name[start:]+".", func(r rune) bool { return r != '#' })
	if strings.Contains(name[end:], "#") || strings.Contains(name, `\`) {
		return nil, fmt.Errorf("name pattern %q: want one run of # and no escapes", name)
	}
	question, err := packQuestion(strings.ReplaceAll(name, "#", "0"), qtype)
	if err != nil {
		return nil, err
	}
	// Text offset i stands at wire offset i+1: each dot is the next label's length,
	// the first label's stands before it.
	return &pattern{question: question, digits: question[start+1 : end+1], n: n, at: first, rng: rand.NewPCG(1, 2)}, nil
}

func (p *pattern) next(dst []byte) int {
	v := p.at
	switch {
	case p.random:
		v = p.rng.Uint64() % p.n
	case p.n > 0:
		p.at = (p.at + 1) % p.n
	default:
		p.at++
	}
	for i := len(p.digits) - 1; i >= 0; i-- {
		p.digits[i] = '0' + byte(v%10)
		v /= 10
	}
	return copy(dst, p.question)
}

func (p *pattern) longest() int { return len(p.question) }
func (p *pattern) count() int   { return int(p.n) }
func (p *pattern) shuffle()     { p.random = p.n > 0 }

// list is the questions of a file.
type list struct {
	questions [][]byte
	at        int
	random    bool
	rng       *rand.PCG
}

// readList reads lines "name [type]"; blank lines and those with # are comments.
func readList(path, qtype string) (*list, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read names: %w", err)
	}
	l := &list{rng: rand.NewPCG(1, 2)}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		t := qtype
		if len(fields) > 1 {
			t = fields[1]
		}
		q, err := packQuestion(fields[0], t)
		if err != nil {
			return nil, err
		}
		l.questions = append(l.questions, q)
	}
	if len(l.questions) == 0 {
		return nil, fmt.Errorf("read names: %s has none", path)
	}
	return l, nil
}

func (l *list) next(dst []byte) int {
	i := l.at
	if l.random {
		i = int(l.rng.Uint64() % uint64(len(l.questions)))
	} else {
		l.at = (l.at + 1) % len(l.questions)
	}
	return copy(dst, l.questions[i])
}

func (l *list) longest() (n int) {
	for _, q := range l.questions {
		n = max(n, len(q))
	}
	return n
}

func (l *list) count() int { return len(l.questions) }
func (l *list) shuffle()   { l.random = true }

var errType = errors.New("unknown type")

func packQuestion(name, qtype string) ([]byte, error) {
	t, ok := dns.StringToType[strings.ToUpper(qtype)]
	if !ok {
		return nil, fmt.Errorf("name %q: %w %q", name, errType, qtype)
	}
	wire := make([]byte, 255)
	n, err := dns.PackDomainName(dns.Fqdn(name), wire, 0, nil, false)
	if err != nil {
		return nil, fmt.Errorf("name %q: %w", name, err)
	}
	q := binary.BigEndian.AppendUint16(wire[:n], t)
	return binary.BigEndian.AppendUint16(q, dns.ClassINET), nil
}
