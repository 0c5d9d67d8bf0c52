package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// runDir is where a server finds its files: a /run of its own.
const runDir = "/run/bench"

// cacheEntries is how many names every cache is configured to hold, so that the
// memory trial's 100,000 fit.
const cacheEntries = 200_000

// server is a program under test and how to run it as a forwarder on one thread
// that keeps cacheEntries names. Settings beyond that are the program's defaults.
type server struct {
	name    string
	program string
	args    []string
	version []string          // arguments that make it say its version
	files   map[string]string // below runDir
	// limit marks the echo: it has no cache to miss or to fill.
	limit bool
	// preallocates marks a cache that takes all its memory at the start: its growth
	// says nothing about an entry.
	preallocates bool
}

// installed is a server whose program is on this machine.
type installed struct {
	server
	path        string
	versionLine string
	size        int64 // of the program file, bytes
}

func servers() []server {
	const listen, upstream = serverAddr, clientAddr
	return []server{
		{
			name: "echo", program: "echo", limit: true,
			args: []string{"-listen", listen + ":53"},
		},
		{
			name: "dnsguard", program: "dnsguard", version: []string{"version"},
			args: []string{"run", "--config", runDir + "/dnsguard.yaml"},
			files: map[string]string{"dnsguard.yaml": `
listen: ["` + listen + `"]
http: "127.0.0.1:9253"
kubernetes: {source: none}
upstreams:
  - {zones: ["."], servers: ["` + upstream + `"]}
cache: {size: 256Mi}
guard: {enabled: false}
log: {level: warn}
`},
		},
		{
			name: "coredns", program: "coredns", version: []string{"-version"},
			args: []string{"-conf", runDir + "/Corefile"},
			files: map[string]string{"Corefile": fmt.Sprintf(`
.:53 {
    bind %s
    errors
    cache 3600 {
        success %d
    }
    loop
    forward . %s
    prometheus 127.0.0.1:9153
}
`, listen, cacheEntries, upstream)},
		},
		{
			name: "unbound", program: "unbound", version: []string{"-V"},
			args: []string{"-d", "-p", "-c", runDir + "/unbound.conf"},
			files: map[string]string{"unbound.conf": `
server:
  directory: "` + runDir + `"
  username: ""
  chroot: ""
  use-syslog: no
  do-daemonize: no
  verbosity: 0
  interface: ` + listen + `
  access-control: 10.99.0.0/24 allow
  num-threads: 1
  module-config: "iterator"
  msg-cache-size: 128m
  rrset-cache-size: 256m
  outgoing-range: 4096
  num-queries-per-thread: 2048
  so-rcvbuf: 4m
remote-control:
  control-enable: no
forward-zone:
  name: "."
  forward-addr: ` + upstream + `
`},
		},
		{
			name: "dnsdist", program: "dnsdist", version: []string{"--version"},
			args: []string{"--supervised", "--disable-syslog", "-C", runDir + "/dnsdist.conf"},
			files: map[string]string{"dnsdist.conf": fmt.Sprintf(`
setLocal("%s:53")
setACL({"10.99.0.0/24"})
newServer({address="%s:53"})
setMaxUDPOutstanding(65535)
setSecurityPollSuffix("")
getPool(""):setCache(newPacketCache(%d))
`, listen, upstream, cacheEntries)},
		},
		{
			name: "knot-resolver", program: "kresd", version: []string{"--version"},
			args: []string{"-n", "-c", runDir + "/kresd.conf", runDir},
			files: map[string]string{"kresd.conf": `
net.listen('` + listen + `', 53, { kind = 'dns' })
cache.size = 256 * MB
trust_anchors.remove('.')
policy.add(policy.all(policy.STUB('` + upstream + `')))
`},
		},
		{
			name: "pdns-recursor", program: "pdns_recursor", version: []string{"--version"},
			args: []string{
				"--config-dir=" + runDir, "--socket-dir=" + runDir, "--daemon=no", "--write-pid=no",
				"--disable-syslog", "--loglevel=3", "--local-address=" + listen,
				"--allow-from=10.99.0.0/24", "--dont-query=", "--forward-zones-recurse=.=" + upstream,
				"--dnssec=off", "--threads=1", "--security-poll-suffix=",
				fmt.Sprintf("--max-cache-entries=%d", 2*cacheEntries),
				fmt.Sprintf("--max-packetcache-entries=%d", cacheEntries),
			},
			files: map[string]string{"recursor.conf": ""},
		},
		{
			name: "dnsmasq", program: "dnsmasq", version: []string{"--version"}, preallocates: true,
			args: []string{
				"--keep-in-foreground", "--conf-file=" + runDir + "/dnsmasq.conf", "--user=root", "--pid-file=",
				"--no-resolv", "--no-hosts", "--listen-address=" + listen, "--bind-interfaces",
				"--server=" + upstream, "--dns-forward-max=10000",
				fmt.Sprintf("--cache-size=%d", cacheEntries),
			},
			files: map[string]string{"dnsmasq.conf": ""},
		},
	}
}

// choose finds the servers to measure: those named in only, which must be there, or
// all that are. paths overrides where a server's program is.
func choose(ctx context.Context, only string, paths map[string]string) ([]installed, error) {
	var wanted []string
	if only != "" {
		wanted = strings.Split(only, ",")
	}
	var found []installed
	for _, s := range servers() {
		if wanted != nil && !slices.Contains(wanted, s.name) {
			continue
		}
		i, err := find(ctx, s, paths[s.name])
		switch {
		case err == nil:
			found = append(found, i)
		case wanted != nil:
			return nil, err
		default:
			fmt.Fprintf(os.Stderr, "leaving out %s: %v\n", s.name, err)
		}
		wanted = slices.DeleteFunc(wanted, func(name string) bool { return name == s.name })
	}
	if len(wanted) > 0 {
		return nil, fmt.Errorf("no such server: %s", strings.Join(wanted, ", "))
	}
	return found, nil
}

func find(ctx context.Context, s server, path string) (installed, error) {
	if path == "" {
		path = s.program
	}
	// Debian keeps daemons where not every user's $PATH goes.
	full, err := exec.LookPath(path)
	if err != nil && filepath.Base(path) == path {
		full, err = exec.LookPath("/usr/sbin/" + path)
	}
	if err != nil {
		return installed{}, fmt.Errorf("find %s: %w", s.name, err)
	}
	if full, err = filepath.Abs(full); err != nil {
		return installed{}, fmt.Errorf("find %s: %w", s.name, err)
	}
	info, err := os.Stat(full)
	if err != nil {
		return installed{}, fmt.Errorf("find %s: %w", s.name, err)
	}
	i := installed{server: s, path: full, size: info.Size()}
	if s.version != nil {
		text, err := exec.CommandContext(ctx, full, s.version...).CombinedOutput()
		if err != nil {
			return installed{}, fmt.Errorf("version of %s: %w", s.name, err)
		}
		i.versionLine = versionLine(string(text))
	}
	return i, nil
}

// versionLine is what a program says of itself in its first line of words, from its
// name on: pdns_recursor logs it, with the time in front.
func versionLine(text string) string {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			if at := strings.Index(line, "PowerDNS"); at > 0 {
				line = line[at:]
			}
			return line
		}
	}
	return ""
}
