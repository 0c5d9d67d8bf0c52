/*
 * What c-ares finds for each name on standard input: the addresses, each once,
 * in ascending order of their text, or the error; then a line with a dot.
 */
#include <ares.h>
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/socket.h>

#define MAX 256

static int compare(const void *a, const void *b) { return strcmp(a, b); }

static void done(void *arg, int status, int timeouts, struct ares_addrinfo *result)
{
	static char found[MAX][INET6_ADDRSTRLEN];
	int n = 0;

	(void)arg, (void)timeouts;
	if (status != ARES_SUCCESS) {
		puts(ares_strerror(status));
		return;
	}
	for (struct ares_addrinfo_node *node = result->nodes; node && n < MAX; node = node->ai_next, n++) {
		const void *addr = &((struct sockaddr_in *)node->ai_addr)->sin_addr;
		if (node->ai_family == AF_INET6)
			addr = &((struct sockaddr_in6 *)node->ai_addr)->sin6_addr;
		inet_ntop(node->ai_family, addr, found[n], sizeof found[n]);
	}
	qsort(found, n, sizeof found[0], compare);
	for (int i = 0; i < n; i++)
		if (i == 0 || strcmp(found[i], found[i - 1]))
			printf("%s%s", i ? " " : "", found[i]);
	puts("");
	ares_freeaddrinfo(result);
}

static int lookup(const char *name)
{
	struct ares_addrinfo_hints hints = {.ai_family = AF_UNSPEC, .ai_flags = ARES_AI_NOSORT};
	ares_channel channel;

	if (ares_init(&channel) != ARES_SUCCESS)
		return -1;
	ares_getaddrinfo(channel, name, NULL, &hints, done, NULL);
	for (;;) {
		fd_set readers, writers;
		struct timeval wait, *timeout;
		int n;

		FD_ZERO(&readers);
		FD_ZERO(&writers);
		if ((n = ares_fds(channel, &readers, &writers)) == 0)
			break;
		timeout = ares_timeout(channel, NULL, &wait);
		select(n, &readers, &writers, NULL, timeout);
		ares_process(channel, &readers, &writers);
	}
	ares_destroy(channel);
	return 0;
}

int main(void)
{
	char name[512];

	if (ares_library_init(ARES_LIB_INIT_ALL) != ARES_SUCCESS)
		return 1;
	while (fgets(name, sizeof name, stdin)) {
		name[strcspn(name, "\n")] = 0;
		if (lookup(name))
			return 1;
		puts(".");
		fflush(stdout);
	}
	return 0;
}
