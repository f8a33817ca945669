package userdir_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/userdir"
)

func TestUse(t *testing.T) {
	home := t.TempDir()
	for _, name := range []string{"HOME", "USERPROFILE", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "AppData", "LocalAppData"} {
		t.Setenv(name, home)
	}
	ask := func(folder func() (string, error)) string {
		dir, err := folder()
		require.NoError(t, err)
		return dir
	}
	user, err := os.UserConfigDir()
	require.NoError(t, err)
	require.Equal(t, user, ask(userdir.Config))
	undo := userdir.Use(userdir.Folders{Config: "a"})
	again := userdir.Use(userdir.Folders{Home: "b", Cache: "c"})
	require.Equal(t, "b", ask(userdir.Home))
	require.Equal(t, "c", ask(userdir.Cache))
	_, err = userdir.Config()
	require.Error(t, err)
	again()
	require.Equal(t, "a", ask(userdir.Config))
	undo()
	require.Equal(t, user, ask(userdir.Config))
}
