package kube

import "cmp"

// Name is the namespace and name of an object. Namespaces have no namespace.
type Name struct {
	Namespace string
	Name      string
}

// String returns namespace/name, or the name alone.
func (n Name) String() string {
	if n.Namespace == "" {
		return n.Name
	}
	return n.Namespace + "/" + n.Name
}

func (n Name) compare(o Name) int {
	return cmp.Or(cmp.Compare(n.Namespace, o.Namespace), cmp.Compare(n.Name, o.Name))
}
