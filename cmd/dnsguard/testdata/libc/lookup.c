/*
 * What getaddrinfo finds for each name on standard input: the addresses, each
 * once, in ascending order of their text, or the name of the error; then a line
 * with a dot.
 */
#define _GNU_SOURCE
#include <netdb.h>
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define MAX 256

static int compare(const void *a, const void *b) { return strcmp(a, b); }

static const char *error_name(int err)
{
	switch (err) {
	case EAI_NONAME: return "EAI_NONAME";
	case EAI_NODATA: return "EAI_NODATA";
	case EAI_AGAIN:  return "EAI_AGAIN";
	case EAI_FAIL:   return "EAI_FAIL";
	case EAI_SYSTEM: return "EAI_SYSTEM";
	}
	return gai_strerror(err);
}

static int lookup(const char *name)
{
	static char found[MAX][INET6_ADDRSTRLEN];
	struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
	struct addrinfo *list, *ai;
	int n = 0, err;

	if ((err = getaddrinfo(name, NULL, &hints, &list)) != 0) {
		puts(error_name(err));
		return 0;
	}
	for (ai = list; ai && n < MAX; ai = ai->ai_next, n++)
		if (getnameinfo(ai->ai_addr, ai->ai_addrlen, found[n], sizeof found[n], NULL, 0, NI_NUMERICHOST))
			return -1;
	freeaddrinfo(list);
	qsort(found, n, sizeof found[0], compare);
	for (int i = 0; i < n; i++)
		if (i == 0 || strcmp(found[i], found[i - 1]))
			printf("%s%s", i ? " " : "", found[i]);
	puts("");
	return 0;
}

int main(void)
{
	char name[512];

	while (fgets(name, sizeof name, stdin)) {
		name[strcspn(name, "\n")] = 0;
		if (lookup(name))
			return 1;
		puts(".");
		fflush(stdout);
	}
	return 0;
}
