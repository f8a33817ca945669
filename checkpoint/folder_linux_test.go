package checkpoint

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/testkit/traced"
)

// TestTheFolderIsResolvedOnce changes a link's target and renames the folder during a run. The run
// must continue in the folder that it opened.
func TestTheFolderIsResolvedOnce(t *testing.T) {
	top := t.TempDir()
	other := open(t, filepath.Join(top, "b"), Options{})
	save(t, other, 4)
	require.NoError(t, other.Confirm())
	require.NoError(t, other.Close())
	before := names(t, filepath.Join(top, "b"))
	require.NoError(t, os.Mkdir(filepath.Join(top, "a"), 0o755))
	link := filepath.Join(top, "l")
	require.NoError(t, os.Symlink("a", link))
	s := open(t, link, Options{Keep: 1})
	save(t, s, 1)
	require.NoError(t, os.Remove(link))
	require.NoError(t, os.Symlink("b", link))
	save(t, s, 2)
	require.NoError(t, s.Confirm())
	require.NoError(t, os.Rename(filepath.Join(top, "a"), filepath.Join(top, "moved")))
	require.NoError(t, os.Symlink("b", filepath.Join(top, "a")))
	save(t, s, 3)
	require.NoError(t, s.Confirm())
	require.NoError(t, s.Close())
	require.Equal(t, []string{"step-00000003"}, names(t, filepath.Join(top, "moved")))
	require.Equal(t, before, names(t, filepath.Join(top, "b")))
}

// TestAnotherUsersMarks checks that marks written by another user remove nothing and that Open
// refuses the folder, even for root.
func TestAnotherUsersMarks(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root gives files away")
	}
	dir := t.TempDir()
	name := tempPrefix + "step-00000001-00000000000000000000000000000000"
	line, err := mark{Event: markWorking, Name: name}.line()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, marksName), line, 0o666))
	require.NoError(t, os.Chown(filepath.Join(dir, marksName), 65534, 65534))
	require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o755))
	_, err = Open(dir, Options{})
	var foreign *Foreign
	require.ErrorAs(t, err, &foreign)
	require.ErrorContains(t, err, "in a folder of your own")
	require.DirExists(t, filepath.Join(dir, name))
	_, err = Choose(background, dir, nil)
	require.NoError(t, err, "readers need none")
}

// TestRemovalFollowsNothing checks that the removal of a folder listed in the marks does not follow
// symbolic links or mounts.
func TestRemovalFollowsNothing(t *testing.T) {
	dir, victim := t.TempDir(), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(victim, "thesis"), nil, 0o644))
	s := open(t, dir, Options{})
	name, err := s.working(tempPrefix + "step-00000001")
	require.NoError(t, err)
	require.NoError(t, s.Close())
	require.NoError(t, os.Symlink(victim, filepath.Join(dir, name)))
	require.NoError(t, open(t, dir, Options{}).Close())
	require.FileExists(t, filepath.Join(victim, "thesis"))
	require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o755))
	if err := unix.Mount(victim, filepath.Join(dir, name), "", unix.MS_BIND, ""); err != nil {
		t.Skip("no mounts here: ", err)
	}
	defer func() { require.NoError(t, unix.Unmount(filepath.Join(dir, name), 0)) }()
	_, err = Open(dir, Options{})
	require.ErrorIs(t, err, filesys.ErrLeads)
	require.FileExists(t, filepath.Join(victim, "thesis"))
}

// TestNothingIsDoneByPath traces the system calls of a store. Once the folder is open, no file may
// be created, renamed or removed by a path.
func TestNothingIsDoneByPath(t *testing.T) {
	if dir := os.Getenv("SPILLWAY_TEST_STORE"); dir != "" {
		s := open(t, dir, Options{Keep: 1})
		for step := 1; step <= 3; step++ {
			save(t, s, step)
			require.NoError(t, s.Confirm())
		}
		require.NoError(t, s.Close())
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^TestNothingIsDoneByPath$")
	cmd.Env = append(os.Environ(), "SPILLWAY_TEST_STORE="+filepath.Join(t.TempDir(), "made", "ck"))
	require.Greater(t, traced.NothingByPath(t, cmd, `step-0|spillway|"ck"|manifest|config\.json|rank-`), 20)
}
