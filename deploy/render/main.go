// Command render writes into a directory what kubectl apply -k would apply of each
// overlay, NAME.yaml, and what helm install would of the chart with its
// monitoring, chart.yaml: for the end-to-end tests, without kubectl and Helm. It runs in deploy:
//
//	go run -C deploy ./render /tmp/rendered
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"helm.sh/helm/v3/pkg/chart/loader"

	"github.com/dnsguard/dnsguard/deploy"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: render DIRECTORY")
		os.Exit(2)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}

func write(to string) error {
	overlays, err := os.ReadDir("overlays")
	if err != nil {
		return err
	}
	for _, o := range overlays {
		data, err := deploy.Overlay(filepath.Join("overlays", o.Name()))
		if err != nil {
			return fmt.Errorf("overlay %s: %w", o.Name(), err)
		}
		if err := os.WriteFile(filepath.Join(to, o.Name()+".yaml"), data, 0o600); err != nil {
			return err
		}
	}
	chart, err := loader.LoadDir(filepath.Join("helm", "dnsguard"))
	if err != nil {
		return err
	}
	data, err := deploy.Chart(chart, "kube-system", "{podMonitor: {enabled: true}, prometheusRule: {enabled: true}}")
	if err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	return os.WriteFile(filepath.Join(to, "chart.yaml"), data, 0o600)
}
