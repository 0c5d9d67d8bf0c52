package main

import (
	"bytes"
	"testing"
)

func TestEcho(t *testing.T) {
	for _, tt := range []struct {
		name     string
		in, want []byte
	}{
		{"sets QR", []byte{1, 2, 0x01, 0x20, 9}, []byte{1, 2, 0x81, 0x20, 9}},
		{"too short for flags", []byte{1, 2}, []byte{1, 2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			buf := bytes.Clone(tt.in)
			if got := buf[:echo(buf, len(buf))]; !bytes.Equal(got, tt.want) {
				t.Errorf("echo(% x) = % x, want % x", tt.in, got, tt.want)
			}
		})
	}
}
