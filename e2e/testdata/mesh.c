/*
 * A client like a mesh's proxy: it resolves all names on standard input at once,
 * and each again when INTERVAL ms have passed since its last outcome, over the one
 * UDP socket that c-ares keeps (ARES_OPT_UDP_MAX_QUERIES is 0 by default: no limit;
 * ARES_FLAG_STAYOPEN: also while nothing is asked). SIGTERM ends it.
 *
 *	mesh SERVER INTERVAL TIMEOUT TRIES
 *
 * prints
 *
 *	socket TYPE PORT       for each socket that c-ares opens
 *	round N MS             when every name has had N outcomes; MS since the start
 *	fail MS NAME ERROR     for each failed resolution
 *	done RESOLUTIONS FAILED WORST    at the end; the worst in ms
 */
#include <ares.h>
#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <time.h>

#define MAX_NAMES 4096

struct name {
	char text[256];
	long due, began; /* ms since the start; due < 0: being resolved */
	long outcomes;
};

static struct name names[MAX_NAMES];
static int count;
static long resolutions, failed, worst, interval, rounds;
static struct timespec begin;
static volatile sig_atomic_t stop;

static void on_term(int sig) { (void)sig, stop = 1; }

static long now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (t.tv_sec - begin.tv_sec) * 1000 + (t.tv_nsec - begin.tv_nsec) / 1000000;
}

static int opened(ares_socket_t fd, int type, void *arg)
{
	struct sockaddr_storage a;
	socklen_t len = sizeof a;
	int port = 0, room = 4 << 20;

	(void)arg;
	if (getsockname(fd, (struct sockaddr *)&a, &len) == 0)
		port = ntohs(a.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&a)->sin6_port : ((struct sockaddr_in *)&a)->sin_port);
	/*
	 * The default buffer holds some 270 small datagrams. On a busy machine, where
	 * answers to 1,000 questions may wait while this program does not run, it would
	 * lose the rest by itself, whoever answered.
	 */
	if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room))
		perror("SO_RCVBUFFORCE");
	printf("socket %s %d\n", type == SOCK_DGRAM ? "udp" : "tcp", port);
	return 0;
}

static void done(void *arg, int status, int timeouts, struct ares_addrinfo *result)
{
	struct name *n = arg;
	long at = now(), least = 0;

	(void)timeouts;
	if (status == ARES_EDESTRUCTION)
		return;
	if (result)
		ares_freeaddrinfo(result);
	resolutions++;
	if (at - n->began > worst)
		worst = at - n->began;
	if (status != ARES_SUCCESS) {
		failed++;
		printf("fail %ld %s %s\n", at, n->text, ares_strerror(status));
	}
	n->due = at + interval;
	n->outcomes++;
	if (n->outcomes != rounds + 1)
		return;
	least = n->outcomes;
	for (int i = 0; i < count; i++)
		if (names[i].outcomes < least)
			least = names[i].outcomes;
	if (least > rounds)
		printf("round %ld %ld\n", rounds = least, at);
}

int main(int argc, char **argv)
{
	struct ares_options options = {.flags = ARES_FLAG_STAYOPEN};
	struct ares_addrinfo_hints hints = {.ai_family = AF_INET, .ai_flags = ARES_AI_NOSORT};
	ares_channel channel;

	if (argc != 5)
		return 2;
	interval = atol(argv[2]);
	options.timeout = atoi(argv[3]);
	options.tries = atoi(argv[4]);
	while (count < MAX_NAMES && fgets(names[count].text, sizeof names[count].text, stdin)) {
		names[count].text[strcspn(names[count].text, "\n")] = 0;
		count++;
	}
	signal(SIGTERM, on_term);
	setvbuf(stdout, NULL, _IOLBF, 0);
	clock_gettime(CLOCK_MONOTONIC, &begin);
	if (ares_library_init(ARES_LIB_INIT_ALL) != ARES_SUCCESS ||
	    ares_init_options(&channel, &options, ARES_OPT_FLAGS | ARES_OPT_TIMEOUTMS | ARES_OPT_TRIES) != ARES_SUCCESS ||
	    ares_set_servers_csv(channel, argv[1]) != ARES_SUCCESS)
		return 1;
	ares_set_socket_callback(channel, opened, NULL);
	while (!stop) {
		struct timeval longest = {.tv_usec = 20000}, wait;
		fd_set readers, writers;
		long at = now();
		int n;

		for (int i = 0; i < count; i++) {
			if (names[i].due < 0 || names[i].due > at)
				continue;
			names[i].due = -1;
			names[i].began = at;
			ares_getaddrinfo(channel, names[i].text, NULL, &hints, done, &names[i]);
		}
		FD_ZERO(&readers);
		FD_ZERO(&writers);
		n = ares_fds(channel, &readers, &writers);
		select(n, &readers, &writers, NULL, ares_timeout(channel, &longest, &wait));
		ares_process(channel, &readers, &writers);
	}
	ares_destroy(channel);
	printf("done %ld %ld %ld\n", resolutions, failed, worst);
	return 0;
}
