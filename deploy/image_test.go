package deploy

import (
	"bytes"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestIPTablesImage: the Containerfile's target iptables needs Debian's image from a
// registry, so that it is not built here. What it asks of Debian is in Debian's
// packages: the programs that it chooses among, those that dnsguard runs as slaves of
// that choice, and every extension that the rules name. The end-to-end tests run the
// overlay in a root of exactly these.
func TestIPTablesImage(t *testing.T) {
	data, err := os.ReadFile("Containerfile")
	if err != nil {
		t.Fatal(err)
	}
	target, _, _ := strings.Cut(string(data), "\nFROM scratch")
	release, err := os.ReadFile("/etc/os-release")
	if err != nil || !bytes.Contains(release, []byte("ID=debian")) {
		t.Fatalf("only Debian knows its packages: %v", err)
	}
	installed := regexp.MustCompile(`apt-get install -y --no-install-recommends ([a-z0-9 .+-]+?) &&`).FindStringSubmatch(target)
	if installed == nil {
		t.Fatalf("what is installed?\n%s", target)
	}
	// With what they depend on, there is no other way to have them.
	files := map[string]bool{}
	for _, p := range append(strings.Fields(installed[1]), "libxtables12") {
		for file := range strings.Lines(output(t, "dpkg-query", "--listfiles", p)) {
			files[strings.TrimSpace(file)] = true
		}
	}
	has := func(file string) {
		t.Helper()
		if !files[file] {
			t.Errorf("%v do not have %s", installed[1], file)
		}
	}

	variants := []string{"legacy", "nft"}
	if m := regexp.MustCompile(`(?m)^ARG IPTABLES=(\w+)$`).FindStringSubmatch(target); m == nil || !slices.Contains(variants, m[1]) {
		t.Errorf("the default variant: %q", m)
	}
	chosen := regexp.MustCompile(`update-alternatives --set (\w+) (/[\w/-]+)-\$\{IPTABLES\}`).FindAllStringSubmatch(target, -1)
	if len(chosen) != 2 {
		t.Fatalf("alternatives %q", chosen)
	}
	for _, c := range chosen {
		group := output(t, "update-alternatives", "--query", c[1])
		for _, variant := range variants {
			has(c[2] + "-" + variant)
			if !strings.Contains(group, "\nAlternative: "+c[2]+"-"+variant+"\n") {
				t.Errorf("%s-%s is no alternative for %s", c[2], variant, c[1])
			}
			for _, verb := range []string{"-restore", "-save"} { // what dnsguard runs
				has(c[2] + "-" + variant + verb)
				if !strings.Contains(group, " "+c[1]+verb+" "+c[2]+"-"+variant+verb+"\n") {
					t.Errorf("%s%s does not come with %s-%s", c[1], verb, c[1], variant)
				}
			}
		}
	}

	rules, err := dnsguard(t, "rules", "--backend=iptables", "--kubernetes.source=none", "--intercept.mode=link-local", "--listen=169.254.20.10,fd53:dd:20::10")
	if err != nil {
		t.Fatalf("%v\n%s", err, rules)
	}
	extensions := map[string]bool{}
	for _, m := range regexp.MustCompile(` -(?:m|j) ([A-Za-z]+)\b`).FindAllStringSubmatch(rules, -1) {
		if name := m[1]; name != "ACCEPT" && name != "RETURN" && name != "DROP" && name != "DNSGUARD" {
			extensions[name] = true
		}
	}
	if !extensions["socket"] || !extensions["CT"] || !extensions["recent"] {
		t.Fatalf("extensions %v in\n%s", extensions, rules)
	}
	for _, name := range slices.Sorted(maps.Keys(extensions)) {
		// A module of either family, in the directory of the machine's kind.
		if !slices.ContainsFunc(slices.Collect(maps.Keys(files)), func(file string) bool {
			return filepath.Base(filepath.Dir(file)) == "xtables" && filepath.Base(file) == "libxt_"+name+".so"
		}) {
			t.Errorf("no extension %s in Debian's packages", name)
		}
	}
}

// output runs a program and returns what it printed.
func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}
