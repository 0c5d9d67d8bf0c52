package cache

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
)

// script plays one file of testdata: what happens to a cache, step by step, in
// virtual time. Blank lines and what follows a # are nothing. Before the steps:
//
//	SIZE bytes
//	ZONE name [positive=D] [negative=D] [stale=D] [stale-nodata=D] [stale-nxdomain=D]
//
// The steps, each "STEP n ...", numbered upwards:
//
//	ANSWER name type [rcode] [aa|ad|tc|do|cd|opt|opt-first|loose] [asked=name]
//	    section RR ...             the answer's records follow, indented;
//	                               "repeat N section RR" has %d for 0 to N-1
//	                               loose: packed without compression
//	                               asked: the key is for this name
//	QUERY name type [do|ad|cd|nord|edns=N|keepalive] [limit=N] [tcp] [trust]
//	STALE, PEEK                    as QUERY, through Cache.Stale and Cache.Peek
//	FAIL name type [ede=N] [text=word]
//	FLOOD n positive|negative|failure [ttl=N] [from=N]    names n.flood.example.
//	TOUCH n [from=N]               look-ups of the same names
//	TIME +D
//	SIZE, ZONE                     reconfigure
//	CHECK what=value ...           of the last ANSWER (as a waiting client
//	                               without EDNS gets it), QUERY, STALE or
//	                               PEEK, and of Stats; also <= and >=
type script struct {
	t     *testing.T
	file  string
	line  int
	step  int
	cfg   Config
	cache *Cache
	facts map[string]string
	// The answer that is being read, until a line is not indented.
	pending *pendingAnswer
}

type pendingAnswer struct {
	msg      *dns.Msg
	asked    string
	do, cd   bool
	opt      bool
	optFirst bool
}

func playScript(t *testing.T, file string) {
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var lines []string
	for in := bufio.NewScanner(f); in.Scan(); {
		lines = append(lines, in.Text())
	}
	synctest.Test(t, func(t *testing.T) {
		s := &script{
			t: t, file: file, facts: map[string]string{},
			cfg: Config{Size: 1 << 20, Zones: []Zone{
				{Name: ".", Positive: time.Hour, Negative: 5 * time.Minute, Stale: time.Hour},
				{Name: "cluster.local", Positive: 30 * time.Second, Negative: 2 * time.Second, Stale: 5 * time.Minute},
			}},
		}
		checks := 0
		for i, line := range lines {
			s.line = i + 1
			line, _, _ = strings.Cut(line, "#")
			words := strings.Fields(line)
			if len(words) == 0 {
				continue
			}
			if line[0] == ' ' || line[0] == '\t' {
				s.record(words)
				continue
			}
			s.finishAnswer()
			if words[0] == "STEP" {
				n := s.int(words[1])
				if n <= s.step {
					s.fatalf("step %d after step %d", n, s.step)
				}
				s.step = n
				s.start()
				words = words[2:]
			} else if s.cache != nil {
				s.fatalf("%s is no step", words[0])
			}
			if words[0] == "CHECK" {
				checks++
			}
			s.do(words[0], words[1:])
		}
		s.finishAnswer()
		if checks == 0 {
			s.fatalf("nothing is checked")
		}
		audit(t, s.cache)
	})
}

func (s *script) fatalf(format string, args ...any) {
	s.t.Helper()
	s.t.Fatalf("%s:%d: %s", s.file, s.line, fmt.Sprintf(format, args...))
}

func (s *script) int(word string) int {
	n, err := strconv.Atoi(word)
	if err != nil {
		s.fatalf("%v", err)
	}
	return n
}

func (s *script) duration(word string) time.Duration {
	d, err := time.ParseDuration(word)
	if err != nil {
		s.fatalf("%v", err)
	}
	return d
}

// start makes the cache, before the first step.
func (s *script) start() {
	if s.cache != nil {
		return
	}
	c, err := New(s.cfg)
	if err != nil {
		s.fatalf("%v", err)
	}
	s.cache = c
}

func (s *script) do(verb string, args []string) {
	s.t.Helper()
	switch verb {
	case "SIZE", "ZONE":
		s.configure(verb, args)
	case "ANSWER":
		s.answer(args)
	case "QUERY", "STALE", "PEEK":
		s.query(verb, args)
	case "FAIL":
		s.fail(args)
	case "FLOOD", "TOUCH":
		s.flood(verb, args)
	case "TIME":
		time.Sleep(s.duration(args[0]))
	case "CHECK":
		s.check(args)
	default:
		s.fatalf("unknown step %s", verb)
	}
}

func (s *script) configure(verb string, args []string) {
	if verb == "SIZE" {
		s.cfg.Size = int64(s.int(args[0]))
	} else {
		zone := Zone{Name: args[0]}
		for _, arg := range args[1:] {
			name, value, _ := strings.Cut(arg, "=")
			d := s.duration(value)
			switch name {
			case "positive":
				zone.Positive = d
			case "negative":
				zone.Negative = d
			case "stale":
				zone.Stale = d
			case "stale-nodata":
				zone.StaleNoData = d
			case "stale-nxdomain":
				zone.StaleNXDomain = d
			default:
				s.fatalf("unknown cap %s", name)
			}
		}
		kept := s.cfg.Zones[:0:0]
		for _, z := range s.cfg.Zones {
			if z.Name != zone.Name {
				kept = append(kept, z)
			}
		}
		s.cfg.Zones = append(kept, zone)
	}
	if s.cache != nil {
		if err := s.cache.Reconfigure(s.cfg); err != nil {
			s.fatalf("%v", err)
		}
	}
}
