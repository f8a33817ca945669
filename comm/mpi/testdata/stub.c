/* A library of the MPI 5 ABI with one rank, which sends to itself: it refuses
   handles that are not the ABI's. How it begins and ends, and what threads it takes calls
   from, is the compiler's to say. */
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#ifndef INIT
#define INIT
#endif
#ifndef FINALIZE
#define FINALIZE return 0
#endif

#define WORLD 0x101
#define BYTE 0x247
#define ERRORS_RETURN 0x143
#define REQUEST_NULL 0x180
#define SERIALIZED 2048
#ifndef PROVIDED
#define PROVIDED SERIALIZED
#endif
#define IN_PLACE ((void *)1)
#define GROUP 0x1001 /* what a split makes */

struct message { void *mem; int count, tag; };
static struct message sent, wanted;

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) { INIT; *provided = PROVIDED; return required == SERIALIZED ? 0 : 16; }
int MPI_Finalize(void) { FINALIZE; }
int MPI_Abort(intptr_t comm, int code) { return comm == WORLD ? 0 : 5; }
int MPI_Comm_size(intptr_t comm, int *size) { *size = 1; return comm == WORLD ? 0 : 5; }
int MPI_Comm_rank(intptr_t comm, int *rank) { *rank = 0; return comm == WORLD ? 0 : 5; }
int MPI_Comm_set_errhandler(intptr_t comm, intptr_t handler) { return comm == WORLD && handler == ERRORS_RETURN ? 0 : 5; }
int MPI_Error_string(int code, char *text, int *n) { strcpy(text, "stub refuses"); *n = 12; return 0; }
int MPI_Get_library_version(char *text, int *n) { strcpy(text, "stub 1.0\nmore"); *n = 13; return 0; }
int MPI_Abi_get_version(int *major, int *minor) { *major = 1; *minor = 0; return 0; }

static int meet(void) {
  if (!sent.mem || !wanted.mem) return 0;
  if (sent.count != wanted.count || sent.tag != wanted.tag) return 15;
  memcpy(wanted.mem, sent.mem, sent.count);
  sent.mem = wanted.mem = 0;
  return 0;
}

static int post(struct message *m, void *mem, int count, intptr_t type, int peer, int tag, intptr_t comm, intptr_t *request) {
  if (type != BYTE || comm != WORLD || peer != 0) return 3;
  m->mem = mem, m->count = count, m->tag = tag;
  *request = 0x1000;
  return meet();
}

int MPI_Isend(void *mem, int n, intptr_t type, int to, int tag, intptr_t comm, intptr_t *r) { return post(&sent, mem, n, type, to, tag, comm, r); }
int MPI_Issend(void *mem, int n, intptr_t type, int to, int tag, intptr_t comm, intptr_t *r) { return post(&sent, mem, n, type, to, tag, comm, r); }
int MPI_Irecv(void *mem, int n, intptr_t type, int from, int tag, intptr_t comm, intptr_t *r) { return post(&wanted, mem, n, type, from, tag, comm, r); }
int MPI_Testall(int n, intptr_t *requests, int *flag, void *statuses) {
  *flag = !sent.mem && !wanted.mem;
  for (int i = 0; i < n && *flag; i++) requests[i] = REQUEST_NULL;
  return statuses ? 9 : 0;
}

/* Types: of contiguous bytes, and that with another extent. One of each is alive at most
   between two calls of MPI_Type_contiguous; both must be committed and freed. */
#define PLAIN 0x2001
#define BLOCK 0x2002
static int contiguous, committed;

int MPI_Comm_split(intptr_t comm, int color, int key, intptr_t *group) { *group = GROUP; return comm == WORLD ? 0 : 5; }
int MPI_Type_contiguous(int n, intptr_t of, intptr_t *type) { contiguous = n, *type = PLAIN; return of == BYTE ? 0 : 3; }
int MPI_Type_create_resized(intptr_t of, intptr_t low, intptr_t extent, intptr_t *type) {
  *type = BLOCK;
  return of == PLAIN && low == 0 && extent >= contiguous ? 0 : 3;
}
int MPI_Type_commit(intptr_t *type) { committed = *type == BLOCK; return committed ? 0 : 3; }
int MPI_Type_free(intptr_t *type) {
  if (*type != PLAIN && *type != BLOCK) return 3;
  if (*type == BLOCK) committed = 0;
  *type = 0;
  return 0;
}

/* bytes of a count of a type, −1 of another */
static int bytes(int n, intptr_t type) { return type == BYTE ? n : type == BLOCK && committed ? n * contiguous : -1; }

static int collect(const void *from, int n, intptr_t as, void *to, int m, intptr_t of, intptr_t comm, intptr_t *request) {
  if (comm != GROUP) return 5;
  if (bytes(m, of) < 0 || from != IN_PLACE && bytes(n, as) != bytes(m, of)) return 15;
  if (from != IN_PLACE) memcpy(to, from, bytes(m, of));
  *request = 0x1000;
  return 0;
}

int MPI_Iallgather(const void *s, int n, intptr_t as, void *r, int m, intptr_t of, intptr_t c, intptr_t *q) { return collect(s, n, as, r, m, of, c, q); }
int MPI_Ialltoall(const void *s, int n, intptr_t as, void *r, int m, intptr_t of, intptr_t c, intptr_t *q) { return collect(s, n, as, r, m, of, c, q); }
int MPI_Iallgatherv(const void *s, int n, intptr_t as, void *r, const int *m, const int *at, intptr_t of, intptr_t c, intptr_t *q) {
  return collect(s, n, as, (char *)r + at[0], m[0], of, c, q);
}
int MPI_Ialltoallv(const void *s, const int *n, const int *from, intptr_t as, void *r, const int *m, const int *at, intptr_t of, intptr_t c, intptr_t *q) {
  return collect((const char *)s + from[0], n[0], as, (char *)r + at[0], m[0], of, c, q);
}
