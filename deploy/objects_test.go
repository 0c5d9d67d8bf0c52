package deploy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// objects are those of one rendering, by kind, namespace and name.
type objects map[string]metav1.Object

// newObject returns what an object is decoded into. Kinds that are not Kubernetes'
// own are decoded into what has no fields to be strict about.
func newObject(kind string) metav1.Object {
	switch kind {
	case "ServiceAccount":
		return new(corev1.ServiceAccount)
	case "ConfigMap":
		return new(corev1.ConfigMap)
	case "Service":
		return new(corev1.Service)
	case "Role":
		return new(rbacv1.Role)
	case "RoleBinding":
		return new(rbacv1.RoleBinding)
	case "ClusterRole":
		return new(rbacv1.ClusterRole)
	case "ClusterRoleBinding":
		return new(rbacv1.ClusterRoleBinding)
	case "DaemonSet":
		return new(appsv1.DaemonSet)
	case "CiliumLocalRedirectPolicy", "PodMonitor", "PrometheusRule":
		return new(unstructured.Unstructured)
	}
	return nil
}

// decode reads YAML documents strictly: no field that the API does not have, none
// twice.
func decode(data []byte) (objects, error) {
	all := objects{}
	r := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data)))
	for {
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		var meta metav1.TypeMeta
		if err := yaml.Unmarshal(doc, &meta); err != nil {
			return nil, err
		}
		if meta.Kind == "" && len(bytes.TrimSpace(stripComments(doc))) == 0 {
			continue
		}
		o := newObject(meta.Kind)
		if o == nil {
			return nil, fmt.Errorf("unexpected kind %q", meta.Kind)
		}
		if u, ok := o.(*unstructured.Unstructured); ok {
			err = yaml.UnmarshalStrict(doc, &u.Object)
		} else {
			err = yaml.UnmarshalStrict(doc, o)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", meta.Kind, err)
		}
		key := meta.Kind + " " + o.GetNamespace() + "/" + o.GetName()
		if all[key] != nil {
			return nil, fmt.Errorf("%s is there twice", key)
		}
		all[key] = o
	}
}

func stripComments(doc []byte) []byte {
	var kept [][]byte
	for line := range bytes.Lines(doc) {
		if !bytes.HasPrefix(bytes.TrimSpace(line), []byte("#")) && !bytes.HasPrefix(line, []byte("---")) {
			kept = append(kept, line)
		}
	}
	return bytes.Join(kept, nil)
}

// decodeFile reads a file of documents.
func decodeFile(t *testing.T, path string) objects {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	all, err := decode(data)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return all
}

// of returns the objects of one type, in the order of their keys.
func of[O metav1.Object](all objects) []O {
	var some []O
	for _, key := range all.keys() {
		if o, ok := all[key].(O); ok {
			some = append(some, o)
		}
	}
	return some
}

// the returns the only object of a type.
func the[O metav1.Object](t *testing.T, all objects) O {
	t.Helper()
	some := of[O](all)
	if len(some) != 1 {
		t.Fatalf("%d objects of type %T, want 1", len(some), *new(O))
	}
	return some[0]
}

func (all objects) keys() []string {
	var keys []string
	for key := range all {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, strings.Compare)
	return keys
}
