package pages

import (
	"bytes"
	"os"
	"strconv"
	"syscall"
)

// window is what a page fault makes resident of a file at most, in bytes: the default of Linux's
// fault_around_bytes.
const window = 64 << 10

// dontDump is MADV_DONTDUMP, which package syscall lacks.
const dontDump = 16

type mapping struct{ start, end uintptr }

var own = ownMappings()

// The package depends on little, so it is initialized before most others touch their pages. Every
// other window is left out of core dumps, where code is left out in any case: neighbors that
// differ in such a flag are different mappings.
func init() {
	for _, m := range own {
		for at := m.start &^ (window - 1); at < m.end; at += 2 * window {
			if start, end := max(at, m.start), min(at+window, m.end); start < end {
				madvise(mapping{start, end}, dontDump)
			}
		}
	}
	Leave()
}

// Leave gives back those of the program's pages that are resident. What is used again comes back
// from the page cache.
func Leave() {
	for _, m := range own {
		madvise(m, syscall.MADV_DONTNEED)
	}
}

// madvise advises the kernel, which may refuse: more is resident then.
func madvise(m mapping, advice uintptr) {
	_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, m.start, m.end-m.start, advice)
}

// ownMappings are the mappings of this program's file that nothing is written to.
func ownMappings() []mapping {
	path, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return nil
	}
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		return nil
	}
	return readOnly(smaps, path)
}

// readOnly picks from the text of a smaps file the private mappings of a path that are not writable
// and hold no page that was written to: the dynamic linker writes to some before it protects them.
func readOnly(smaps []byte, path string) (list []mapping) {
	ours := false
	for line := range bytes.Lines(smaps) {
		f := bytes.Fields(line)
		switch {
		case len(f) < 2:
		case !bytes.HasSuffix(f[0], []byte(":")): // a mapping begins
			perms := string(f[1])
			ours = (perms == "r-xp" || perms == "r--p") && bytes.HasSuffix(bytes.TrimSpace(line), []byte(" "+path))
			if ours {
				list = append(list, addresses(string(f[0])))
			}
		case ours && (string(f[0]) == "Anonymous:" || string(f[0]) == "Swap:") && string(f[1]) != "0":
			ours, list = false, list[:len(list)-1]
		}
	}
	return list
}

// addresses reads a smaps file's START-END; what is not that is an empty mapping.
func addresses(text string) mapping {
	from, to, _ := bytes.Cut([]byte(text), []byte("-"))
	start, err := strconv.ParseUint(string(from), 16, 64)
	if err != nil {
		return mapping{}
	}
	end, err := strconv.ParseUint(string(to), 16, 64)
	if err != nil || end < start {
		return mapping{}
	}
	return mapping{uintptr(start), uintptr(end)}
}
