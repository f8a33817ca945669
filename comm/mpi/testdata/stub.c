/* A library of the MPI 5 ABI with one rank, which sends to itself: it refuses
   handles that are not the ABI's. */
#include <stdint.h>
#include <string.h>

#define WORLD 0x101
#define BYTE 0x247
#define ERRORS_RETURN 0x143
#define REQUEST_NULL 0x180
#define FUNNELED 1024

struct message { void *mem; int count, tag; };
static struct message sent, wanted;

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) { *provided = required; return required == FUNNELED ? 0 : 16; }
int MPI_Finalize(void) { return 0; }
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
