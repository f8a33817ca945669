// What the binding calls, with the arguments held against what the test passes: the
// 128-byte id comes by value, the config as version 2.18 lays it out.
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifndef VERSION
#define VERSION 22105
#endif

typedef struct { char internal[128]; } id_t_;
typedef struct {
	size_t size;
	unsigned int magic, version;
	int blocking, cgaClusterSize, minCTAs, maxCTAs;
	const char *netName;
	int splitShare;
} config_t_;

static char last[256];
static int fail(const char *what, long long v) {
	snprintf(last, sizeof last, "%s is %lld", what, v);
	return 4;
}
#define WANT(x, v) if ((long long)(x) != (long long)(v)) return fail(#x, (long long)(x))

int ncclGetVersion(int *v) { *v = VERSION; return 0; }
const char *ncclGetErrorString(int r) { return r == 4 ? "invalid argument" : "other"; }
const char *ncclGetLastError(void *c) { return last; }
int ncclGetUniqueId(id_t_ *id) {
	for (int i = 0; i < 128; i++) id->internal[i] = (char)(i * 7 + 1);
	return 0;
}
int ncclCommInitRankConfig(void **comm, int nranks, id_t_ id, int rank, config_t_ *c) {
	WANT(nranks, 5);
	WANT(rank, 3);
	for (int i = 0; i < 128; i++) WANT(id.internal[i], (char)(i * 7 + 1));
	WANT(c->size, sizeof *c);
	WANT(c->magic, 0xcafebeef);
	WANT(c->version, 21800);
	WANT(c->blocking, 0);
	WANT(c->cgaClusterSize, INT_MIN);
	WANT(c->minCTAs, INT_MIN);
	WANT(c->maxCTAs, INT_MIN);
	WANT((intptr_t)c->netName, 0);
	WANT(c->splitShare, 1);
	memset(&id, 0, sizeof id); // a callee owns what comes by value
	*comm = (void *)0x1234567890;
	return 7;
}
int ncclCommSplit(void *c, int color, int key, void **to, void *config) {
	WANT((intptr_t)c, 0x1234567890);
	WANT(color, 2);
	WANT(key, 9);
	config_t_ *o = config;
	WANT(o->magic, 0xcafebeef);
	WANT(o->blocking, 0);
	WANT(o->minCTAs, 1);
	WANT(o->maxCTAs, 3);
	WANT(o->splitShare, 0);
	*to = (void *)0x77;
	return 7;
}
int ncclCommShrink(void *c, int *list, int n, void **to, void *config, int flags) {
	WANT((intptr_t)c, 0x1234567890);
	WANT(n, 2);
	WANT(list[0], 1);
	WANT(list[1], 4);
	config_t_ *o = config;
	WANT(o->size, sizeof *o);
	WANT(o->magic, 0xcafebeef);
	WANT(o->version, 21800);
	WANT(o->blocking, 0);
	WANT(o->minCTAs, 1);
	WANT(o->maxCTAs, 1);
	WANT(flags, 0);
	*to = (void *)0x88;
	return 7;
}
static int state = 7;
int ncclCommGetAsyncError(void *c, int *r) {
	WANT((intptr_t)c, 0x1234567890);
	*r = state;
	state = state == 7 ? 0 : 6;
	return 0;
}
#define HANDLE(f) int f(void *c) { WANT((intptr_t)c, 0x1234567890); return 0; }
HANDLE(ncclCommFinalize)
HANDLE(ncclCommDestroy)
HANDLE(ncclCommAbort)
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) { return 0; }
#define MOVED WANT(count, 1LL << 33); WANT(type, 1); WANT((intptr_t)c, 0x1234567890); WANT((intptr_t)s, 0x55)
int ncclAllGather(const void *send, void *recv, size_t count, int type, void *c, void *s) {
	WANT((intptr_t)send, 0x1000);
	WANT((intptr_t)recv, 0x2000);
	MOVED;
	return 0;
}
int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, void *c, void *s) {
	WANT((intptr_t)send, 0x1000);
	WANT((intptr_t)recv, 0x1000);
	WANT(root, 4);
	MOVED;
	return 0;
}
#define POINT(f, p) int f(void *buf, size_t count, int type, int peer, void *c, void *s) { \
	WANT((intptr_t)buf, 0x1000); WANT(peer, p); MOVED; return 0; }
POINT(ncclSend, 1)
POINT(ncclRecv, 2)
