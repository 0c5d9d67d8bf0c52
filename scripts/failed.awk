# Of the log of a `go test -v`, prints a line for each package that failed: its path and
# the names of its tests that did, joined by |, or .* if it is not known which (it did not
# build, crashed, or took too long).
/^--- FAIL: /                     { names = names (names == "" ? "" : "|") $3 }
/^(panic:|fatal error:)/          { whole = 1 }
/^FAIL[ \t]+[^ \t]+\//            { print $2, whole || names == "" ? ".*" : names }
/^(ok|FAIL|\?)[ \t]+[^ \t]+\//    { names = ""; whole = 0 }
