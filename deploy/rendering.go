package deploy

import (
	"maps"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// Overlay returns what kubectl apply -k would apply from a directory, as YAML
// documents.
func Overlay(dir string) ([]byte, error) {
	m, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		return nil, err
	}
	return m.AsYaml()
}

// Chart returns what helm template prints of a chart, and helm install applies, for
// values in YAML.
func Chart(c *chart.Chart, namespace, values string) ([]byte, error) {
	return renderWith(engine.Engine{}, c, namespace, values)
}

func renderWith(e engine.Engine, c *chart.Chart, namespace, values string) ([]byte, error) {
	v, err := chartutil.ReadValues([]byte(values))
	if err != nil {
		return nil, err
	}
	rendered, err := chartutil.ToRenderValues(c, v, chartutil.ReleaseOptions{Name: "dnsguard", Namespace: namespace, IsInstall: true}, nil)
	if err != nil {
		return nil, err
	}
	files, err := e.Render(c, rendered)
	if err != nil {
		return nil, err
	}
	var out strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		out.WriteString("---\n" + files[name] + "\n")
	}
	return []byte(out.String()), nil
}
