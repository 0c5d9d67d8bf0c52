package kubelab

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"
)

// Object names an object of a manifest.
type Object struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name      string `json:"name"`
		Namespace string `json:"namespace"`
	} `json:"metadata"`
}

func (o Object) String() string { return strings.ToLower(o.Kind) + "/" + o.Metadata.Name }

// path is where the API server has the object.
func (o Object) path() string {
	base := "/apis/" + o.APIVersion
	if o.APIVersion == "v1" {
		base = "/api/v1"
	}
	if o.Metadata.Namespace != "" {
		base += "/namespaces/" + o.Metadata.Namespace
	}
	plural := strings.ToLower(o.Kind) + "s"
	if y, ok := strings.CutSuffix(plural, "ys"); ok {
		plural = y + "ies"
	}
	return base + "/" + plural + "/" + o.Metadata.Name
}

// Apply applies the documents of a manifest, as kubectl apply --server-side
// --force-conflicts does, and returns their names. With dryRun the server decides, and stores nothing.
func (c *Cluster) Apply(ctx context.Context, manifest []byte, dryRun bool) ([]Object, error) {
	query := "?fieldManager=e2e&fieldValidation=Strict&force=true"
	if dryRun {
		query += "&dryRun=All"
	}
	var applied []Object
	for doc := range bytes.SplitSeq(manifest, []byte("\n---\n")) {
		var o Object
		if err := yaml.Unmarshal(doc, &o); err != nil {
			return applied, err
		}
		if o.Kind == "" { // only comments
			continue
		}
		if err := c.Do(ctx, http.MethodPatch, o.path()+query, "application/apply-patch+yaml", doc, nil); err != nil {
			return applied, fmt.Errorf("apply %v: %w", o, err)
		}
		applied = append(applied, o)
	}
	return applied, nil
}

// Delete deletes an object, and nothing that it owns: no garbage collector runs.
func (c *Cluster) Delete(ctx context.Context, o Object) error {
	return c.Do(ctx, http.MethodDelete, o.path()+"?propagationPolicy=Background", "", nil, nil)
}

// Do makes a request of the API server, with a body of the type, and reads the
// answer into out unless it is nil.
func (c *Cluster) Do(ctx context.Context, method, path, bodyType string, body []byte, out any) error {
	client, err := rest.HTTPClientFor(c.Admin)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, "https://"+apiServer+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	if bodyType != "" {
		req.Header.Set("Content-Type", bodyType)
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= http.StatusMultipleChoices {
		var status struct{ Message string }
		if json.Unmarshal(text, &status) == nil && status.Message != "" {
			text = []byte(status.Message)
		}
		return fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, text)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(text, out)
}
