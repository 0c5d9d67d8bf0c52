# Of the log of a `go test -v`, prints what the failed tests and packages said.
/^=== (RUN|CONT|NAME|PAUSE) / { test = $3; next }
/^ *--- (PASS|SKIP|BENCH): /  { next }
/^ *--- FAIL: /               { failed[n++] = $3; next }
/^(ok|\?|FAIL|PASS)$/         { next }
/^(ok|\?|FAIL)[ \t]/ {
	if ($1 == "FAIL") {
		print
		# A build error belongs to no test; a crash to the one that ran, which
		# may have had no time to fail.
		printf "%s", text[""]
		if (n == 0 && test != "") {
			print "--- CRASH: " test
			printf "%s", text[test]
		}
		for (i = 0; i < n; i++) {
			print "--- FAIL: " failed[i]
			printf "%s", text[failed[i]]
		}
	}
	delete text
	delete failed
	n = 0
	test = ""
	next
}
{ text[test] = text[test] $0 "\n" }
