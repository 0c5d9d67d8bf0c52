package main

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/dnsguard/dnsguard/internal/config"
)

// nodeResolvConf is what kubelet gives a pod with dnsPolicy Default, as ours is:
// the file whose domains it also appends to the lists of all others.
const nodeResolvConf = "/etc/resolv.conf"

// warnOfNodeDomains tells once that the node has search domains of which the
// configuration does not know.
func (d *daemon) warnOfNodeDomains(cfg *config.Config, file string) {
	missing := missingNodeDomains(cfg, file)
	text := ""
	if len(missing) > 0 {
		text = fmt.Sprintf("%s also searches %s: names that are both there and as they are may be found as they are, where a pod's libc would find the first; name all its domains in search.domains", file, strings.Join(missing, " "))
	}
	if d.conditions.warn("search.domains", text) && text != "" {
		d.log.Warn("the node's search domains are not in search.domains", "file", file, "missing", missing)
	}
}

// missingNodeDomains returns the domains that pods of this node search and that
// search.domains lacks. Those of the cluster are kubelet's own doing, in a pod
// with another dnsPolicy. Without a cluster there is nothing to tell.
func missingNodeDomains(cfg *config.Config, file string) (missing []string) {
	if cfg.Kubernetes.Source == config.SourceNone || !cfg.Search.Collapse && !cfg.Search.Expand {
		return nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil // the upstreams tell where it matters
	}
	for _, domain := range searchLine(string(text)) {
		domain = strings.ToLower(domain)
		inCluster := domain == cfg.ClusterDomain || strings.HasSuffix(domain, "."+cfg.ClusterDomain)
		if !inCluster && !slices.ContainsFunc(cfg.Search.Domains, func(d string) bool { return strings.TrimSuffix(strings.ToLower(d), ".") == domain }) {
			missing = append(missing, domain)
		}
	}
	return missing
}

// searchLine reads the domains of a resolv.conf as kubelet does (parseResolvConf):
// the last line counts, final dots do not, nor does the root.
func searchLine(text string) (domains []string) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != "search" {
			continue
		}
		domains = nil
		for _, d := range fields[1:] {
			if d != "." {
				domains = append(domains, strings.TrimSuffix(d, "."))
			}
		}
	}
	return domains
}
