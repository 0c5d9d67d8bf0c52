// Package ratio keeps the code that every query goes through from becoming twice as
// slow unnoticed. It has tests only, which are not built for the race detector.
//
// Each workload is timed in turns with a calibration: work of the same kind, made of
// the standard library alone, that no change here can make slower. What is compared
// with baseline.txt is the workload's time in units of the calibration's, each the
// least of many short slices: a neighbour on the same CPU only makes slices longer, and
// a slower machine makes both longer.
//
// A change that makes a workload slower, or much faster, for a reason, brings a new
// baseline with it:
//
//	go test ./bench/ratio -update
//
// Ratios differ by some tenths between kinds of processors and versions of Go; the
// bound leaves room for that. It is no benchmark: small losses are found with benchstat
// and the packages' own benchmarks.
package ratio
