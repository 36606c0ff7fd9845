"""The oracle of ``mpidist check``: where N ranks first compute something else than one process."""
